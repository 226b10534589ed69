"""The section ``grpo``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftcli.config.base import Count, Fraction, Items, PathText, Rate, Section, Served
from ftcli.config.evaluation import AddressConfig, OnError, RewardConfig
from ftcli.methods.distill.settings import SampledConfig


class RewardPlateauConfig(Section):
    """Ends training when rewards rise no more. A measurement is the mean reward of `window` rollouts."""

    window: Count = Field(default=20, description="Rollouts whose mean reward is one measurement.")
    patience: Count = Field(default=3, description="Measurements in a row without improvement before training ends.")
    min_delta: Rate = Field(default=0.0, description="What counts as an improvement: by more than this.")


class EntropyCollapseConfig(Section):
    """Ends training when sampled tokens have hardly any entropy: completions are all alike, and nothing is explored."""

    min_entropy: Annotated[float, Field(gt=0, le=100)] = Field(
        default=0.01, description="Lowest acceptable mean entropy of sampled tokens, in nats."
    )
    patience: Count = Field(
        default=10, description="Optimizer steps in a row below `min_entropy` before training ends."
    )


class GrpoStoppingConfig(Section):
    """When GRPO ends before its last step. What was trained until then is the result."""

    reward: RewardPlateauConfig | None = Field(default=None, description="When rewards stop rising.")
    entropy: EntropyCollapseConfig | None = Field(default=None, description="When entropy has collapsed.")


class EnvironmentConfig(Section):
    """An environment that the model acts in, by TRL's contract: a class with `reset`, public methods as tools, and
    `get_reward` where it has a reward of its own.
    """

    file: Annotated[str, Field(pattern=r"^.+\.py:[A-Za-z_]\w*$"), Served] = Field(
        description="`path.py:Class`, made without arguments; each rollout has an instance in a process of its own."
    )
    max_tool_calling_iterations: Count | None = Field(
        default=None, description="Turns of a rollout that may call tools; no limit but that of tokens when absent."
    )
    timeout: Annotated[float, Field(gt=0, le=3600)] = Field(
        default=30.0, description="Seconds of `reset`, of the calls of a turn, and of `get_reward`."
    )
    max_response_chars: Count | None = Field(
        default=None, description="Characters of a tool's answer that the model sees; all when absent."
    )
    weight: Annotated[float, Field(ge=-10_000, le=10_000)] = Field(
        default=1.0, description="Weight of its own reward in the sum."
    )
    on_error: OnError = Field(
        default="stop", description="What happens to a rollout whose `get_reward` fails, as for rewards."
    )
    lockstep: bool = Field(
        default=False,
        description="Have all rollouts wait for each other's tools: a run that is repeated then has the same bits. On "
        "a CPU they always do.",
    )


class ServerConfig(AddressConfig):
    """vLLM's server, which samples rollouts by the adapter that it is given before each of them."""

    adapters: PathText | None = Field(
        default=None,
        description="A folder that adapters are handed over in; the server must reach it under the same path. One in "
        "the run's directory when absent.",
    )
    concurrency: Annotated[int, Field(ge=1, le=1024)] = Field(default=256, description="Requests at a time.")
    timeout: Annotated[float, Field(gt=0, le=3600)] = Field(default=600.0, description="Seconds of one request.")


class RewardFailuresConfig(Section):
    """How many completions rewards may fail on before the run stops."""

    max_fraction: Fraction = Field(
        default=0.05,
        description="Share of a reward's last 1,000 completions that it may fail to judge before the run stops. 1 "
        "never stops.",
    )


class GrpoConfig(SampledConfig):
    """GRPO reinforcement fine-tuning. Leaf names are those of TRL's GRPOConfig."""

    num_generations: Annotated[int, Field(ge=2, le=1024)] = Field(default=8, description="Completions per prompt.")
    max_completion_length: Count = Field(default=256, description="Longest completion in tokens; sampling ends there.")
    temperature: Annotated[float, Field(ge=0.001, le=10)] = Field(default=1.0, description="Sampling temperature.")
    stop_strings: Items[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default=(),
        description="Texts that end a completion, beside the tokens that end a turn. They are trained; what rewards "
        "see ends before them. `eval.generate.stop_strings` is that of `eval.tasks`.",
    )
    beta: Annotated[float, Field(ge=0, le=1e6)] = Field(
        default=0.0, description="KL penalty against the base model; 0 loads no reference."
    )
    epsilon: Annotated[float, Field(gt=0, le=1e6)] = Field(default=0.2, description="Lower clip of the ratio.")
    epsilon_high: Annotated[float, Field(gt=0, le=1e6)] | None = Field(
        default=None, description="Upper clip of the ratio; `epsilon` when absent."
    )
    delta: Annotated[float, Field(gt=1, le=1e6)] | None = Field(
        default=None,
        description="Upper bound of the ratio where the advantage is negative (two-sided clip); above 1 + the upper "
        "clip. None when absent.",
    )
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = Field(
        default="dapo", description="TRL's losses: how ratios are clipped or weighed, and what the sum is divided by."
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        default="token", description="Whether each token has a ratio of its own, or each completion one (GSPO)."
    )
    advantage_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = Field(
        default="grpo",
        description="What a completion is compared with: `grpo` its group's mean, `rloo` that of the others in it, "
        "`reinforce_plus_plus` the mean of all completions, `reinforce_plus_plus_baseline` its group's, scaled over "
        "all.",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="Whether advantages come from the sum of rewards, or each reward is scaled in its group before "
        "they are summed (GDPO).",
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group",
        description="What the advantages' standard deviation is taken over. `rloo` scales with `batch` alone.",
    )
    teacher_coef: Annotated[float, Field(ge=0, le=1e3)] = Field(
        default=0.0,
        description="Adds to each token's advantage so many times what a teacher's log-probability of it is above the "
        "policy's; 0 asks no teacher.",
    )
    num_iterations: Count = Field(default=1, description="Optimizer passes over one set of completions.")
    steps_per_generation: Count | None = Field(
        default=None,
        description="Micro-batches from one set of completions; `train.gradient_accumulation_steps` when absent. A "
        "multiple of that makes several optimizer steps learn from one set.",
    )
    use_bias_correction_kl: bool = Field(
        default=True,
        description="Weigh the KL penalty by the ratio, which makes its gradient unbiased (DeepSeek-V3.2).",
    )
    sync_ref_model: bool = Field(default=False, description="Have the reference of `beta` follow the policy.")
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.6,
        description="Share of the policy in a reference that follows; the rest stays what it was. 1 for adapters.",
    )
    ref_model_sync_steps: Count = Field(
        default=512, description="Optimizer steps after which a reference that follows takes the policy's weights."
    )
    entropy_coef: Annotated[float, Field(ge=-1e3, le=1e3)] = Field(
        default=0.0, description="Weight of the mean entropy of trained tokens, which is subtracted from the loss."
    )
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Share of a micro-batch's tokens, those of highest entropy, that the policy loss has."
    )
    off_policy_mask_threshold: Annotated[float, Field(gt=0, le=1e3)] | None = Field(
        default=None,
        description="Leaves out completions with a negative advantage whose log-probability has fallen by more than so "
        "many nats a token since they were sampled.",
    )
    max_resample_times: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0,
        description="Rounds in which groups without spread make way for completions of other prompts (DAPO's dynamic "
        "sampling); what has none after them stays.",
    )
    overlong_buffer: Count | None = Field(
        default=None,
        description="Tokens before `max_completion_length` over which a further reward falls from 0 to -1 (DAPO's soft "
        "overlong penalty).",
    )
    overlong_penalty: Annotated[float, Field(gt=0, le=10_000)] = Field(
        default=1.0, description="Weight of that reward."
    )
    mask_truncated_completions: bool = Field(
        default=False, description="Leave completions without a stop token out of the loss."
    )
    rewards: Items[RewardConfig] = Field(default=(), description="Rewards, summed by weight.")
    environment: EnvironmentConfig | None = Field(
        default=None, description="What the model acts in, over several turns; none when absent."
    )
    server: ServerConfig | None = Field(
        default=None, description="A server of vLLM that samples rollouts; ftcli's own engine when absent."
    )
    steps_ahead: Literal[0, 1] = Field(
        default=0, description="1: the server samples the next rollout while this one is learnt from."
    )
    reward_failures: RewardFailuresConfig = Field(
        default_factory=RewardFailuresConfig, description="When a run stops because rewards fail."
    )
    shuffle_rewards: bool = Field(
        default=False, description="Control experiment: deal the rewards out at random; nothing may be learnt."
    )
    early_stopping: GrpoStoppingConfig | None = Field(
        default=None, description="When training ends before its last step; never when absent."
    )
    completions_kept: Count = Field(
        default=1000,
        description="Logging steps whose completions stay in completions/; of more, every second goes, then every "
        "fourth.",
    )

    def micro_batches(self, accumulation: int) -> int:
        """Those that one set of completions is made for, with ``train.gradient_accumulation_steps``."""
        return self.steps_per_generation or accumulation
