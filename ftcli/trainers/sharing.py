"""GRPO on several ranks. Each does what one process would that accumulates N times as many micro-batches, except for
what takes long: completions, rewards and passes without gradient are shared out and exchanged, and so are the
micro-batches of a step.

So every rank has all completions of a step with their rewards and advantages, computed once somewhere, and mixes them
into the same micro-batches. Rank r trains on every N-th of them, from the r-th on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftcli.generation.requests import Completion
from ftcli.plain import JsonObject
from ftcli.preflight.memory.terms import GENERATION
from ftcli.train.parallel import SEED_SPREAD
from ftcli.trainers.spans import TRAINING, Spans
from ftcli.trainers.together import TogetherMixin

if TYPE_CHECKING:
    from collections import defaultdict

    from trl.trainer.utils import RepeatSampler

    from ftcli.run.group import RankGroup


def exchanged(group: RankGroup, where: str, mine: bytes) -> list[bytes]:
    """What each rank has, on all of them; called by all at the same place, whose first seven letters name it.

    Raises PeerFailed or RankLost as :meth:`ftcli.run.group.RankGroup.agree`.
    """
    sizes = [numbers[0] for numbers in group.agree(where, [len(mine)])]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(mine)] = torch.from_numpy(np.frombuffer(mine, np.uint8).copy())
    found = group.gather(padded)
    return [row[:size].numpy().tobytes() for row, size in zip(found, sizes, strict=True)]


def exchanged_json(group: RankGroup, where: str, mine: Any) -> list[Any]:
    """As :func:`exchanged`, for what JSON can say; floats come as they are, NaN included."""
    return [json.loads(said) for said in exchanged(group, where, json.dumps(mine).encode())]


def of_leader(group: RankGroup | None, where: str, mine: Mapping[str, float]) -> Mapping[str, float]:
    """Rank 0's numbers, on all ranks."""
    if group is None:
        return mine
    found: Mapping[str, float] = exchanged_json(group, where, dict(mine))[0]
    return found


class SharingMixin(TogetherMixin):
    """Mixed into TRL's GRPOTrainer before :class:`ftcli.trainers.base.RunTrainerMixin`; without a group it only draws
    the order of completions from seed and step, so that it is the same on any number of ranks.
    """

    spans: Spans
    num_generations: int
    num_iterations: int
    shuffle_dataset: bool
    reward_func_names: list[str]
    _metrics: dict[str, defaultdict[str, list[float]]]
    _buffered_inputs: list[dict[str, Tensor]]
    _step: int
    _current_train_step_time: float
    current_gradient_accumulation_steps: int
    _of_batches: list[dict[str, list[float]]]

    # -- what a step learns from -----------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Any = None) -> RepeatSampler:
        sampler: RepeatSampler = super()._get_train_sampler(dataset)  # type: ignore[misc]
        if self.group is not None:  # a rank asks for a batch of prompts once in each of its own micro-batches
            sampler.repeat_count //= self.group.size
        return sampler

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Tensor]:
        """This rank's next micro-batch, of completions that are sampled where they are needed."""
        seed = self.args.seed * SEED_SPREAD + self.state.global_step  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed % 2**63)  # decides which completions share a micro-batch
            inputs: dict[str, Tensor] = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if self.group is None:
            return inputs
        return self._at_hand(self._buffered_inputs)[self.group.rank]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """As its base, which asks how many micro-batches a step has: where completions serve one step, their
        log-probabilities are those of the training pass.
        """
        args = self.args  # type: ignore[attr-defined]
        own = args.gradient_accumulation_steps
        args.gradient_accumulation_steps = own if self.group is None else own * self.group.size
        try:
            found: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        finally:
            args.gradient_accumulation_steps = own
        return found

    def _at_hand(self, batches: Sequence[dict[str, Tensor]]) -> Sequence[dict[str, Tensor]]:
        """The micro-batches of all ranks that are computed now."""
        size = 1 if self.group is None else self.group.size
        at = self._step % len(batches)
        return batches[at : at + size]

    def completed(self, found: Sequence[Completion]) -> list[tuple[list[int], list[float]]]:
        """Tokens of all ranks' completions and what is known of their log-probabilities, in order, from this rank's."""
        mine = [(one.tokens, one.logprobs) for one in found]
        if self.group is None:
            return mine
        told = exchanged(self.group, "rollouts", _packed(mine))
        return [one for said in told for one in _unpacked(said)]

    def own_rows(self, rows: int) -> slice:
        """Which of so many completions this rank is to see to: as many as each other."""
        if self.group is None:
            return slice(0, rows)
        share = rows // self.group.size
        return slice(share * self.group.rank, share * (self.group.rank + 1))

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Tensor:
        """Rewards of all completions, (completions, rewards): each rank judges whole groups."""
        group = self.group
        if group is None:
            whole: Tensor = super()._calculate_rewards(inputs, prompts, completions, ids)  # type: ignore[misc]
            return whole
        groups = len(prompts) // self.num_generations
        start, end = (groups * rank // group.size * self.num_generations for rank in (group.rank, group.rank + 1))
        device, names = self.args.device, len(self.reward_func_names)  # type: ignore[attr-defined]
        mine = torch.zeros(0, names)
        if end > start:
            parts = (each[start:end] for each in (inputs, prompts, completions, ids))
            mine = super()._calculate_rewards(*parts).cpu()  # type: ignore[misc]
        return torch.cat(_tensors(exchanged(group, "rewards", _bytes(mine)), names)).to(device)

    def told(self, mine: JsonObject) -> list[JsonObject]:
        """What each rank has to say, on all of them."""
        return [mine] if self.group is None else exchanged_json(self.group, "telling", mine)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        """As its base. Those of all completions, before training, are shared out."""
        compute = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        group = self.group
        if group is None or self.phase != GENERATION:  # type: ignore[attr-defined]
            alone: tuple[Tensor, Tensor | None, None] = compute(model, input_ids, attention_mask, *args, **kwargs)
            return alone
        own = self.own_rows(len(input_ids))
        found = compute(model, input_ids[own], attention_mask[own], *args, **kwargs)
        log_probs, entropies = (
            None
            if part is None
            else torch.cat(_tensors(exchanged(group, "log-probs", _bytes(part.cpu())), part.shape[1])).to(part.device)
            for part in found[:2]
        )
        assert log_probs is not None
        return log_probs, entropies, None

    # -- a step ----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """As its base."""
        super().begin_step()
        self._of_batches = []

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As its base; steps are counted in micro-batches of all ranks, and the loss is divided by as many."""
        group = self.group
        if group is None:
            alone: Tensor = super().training_step(*args, **kwargs)
            return alone
        self.current_gradient_accumulation_steps = len(self._rows) * group.size  # type: ignore[attr-defined]
        loss = super().training_step(*args, **kwargs)
        self._step += group.size - 1
        if self._step % self.current_gradient_accumulation_steps == 0:  # where TRL looks, it is one batch further
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def count_tokens(self, mask: Tensor, computed: int = 0) -> None:
        """Counts the completions of all ranks' micro-batches: each rank has them."""
        if self.group is not None:
            mask = torch.cat([batch["completion_mask"] for batch in self._at_hand(self._buffered_inputs)])
        super(TogetherMixin, self).count_tokens(mask, computed)  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """As its base. What TRL notes of a micro-batch waits until all ranks have told theirs."""
        if self.group is None:
            alone: Tensor = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
            return alone
        noted = self._metrics["train"]
        before = {name: len(values) for name, values in noted.items()}
        loss: Tensor = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        found: dict[str, list[float]] = {}
        for name, values in list(noted.items()):
            known = before.get(name, 0)
            if len(values) > known:
                found[name] = values[known:]
                del values[known:]
            if not values:
                del noted[name]  # TRL takes the mean of each
        self._of_batches.append(found)
        return loss

    def _together(self, group: RankGroup) -> Tensor:
        loss = super()._together(group)
        tokens = self.spans.counted(TRAINING)
        told = exchanged_json(group, "metrics", [self._of_batches, tokens])
        self.spans.count(TRAINING, sum(each for _, each in told) - tokens)
        for batch in range(len(self._of_batches)):
            for batches, _ in told:
                for name, values in batches[batch].items():
                    self._metrics["train"][name].extend(values)
        self._of_batches = []
        return loss


def _packed(completions: Sequence[tuple[list[int], list[float]]]) -> bytes:
    """Their number, the numbers of tokens and of log-probabilities of each, then all of both."""
    sizes = [len(completions), *(len(each) for one in completions for each in one)]
    tokens = [token for one, _ in completions for token in one]
    known = [number for _, one in completions for number in one]
    return np.array([*sizes, *tokens], np.int64).tobytes() + np.array(known, np.float64).tobytes()


def _unpacked(said: bytes) -> list[tuple[list[int], list[float]]]:
    whole = np.frombuffer(said, np.int64)
    count = int(whole[0])
    sizes = whole[1 : 1 + 2 * count].reshape(count, 2)
    start = 1 + 2 * count
    tokens = whole[start : start + int(sizes[:, 0].sum())]
    known = np.frombuffer(said, np.float64)[start + len(tokens) :]
    ends = sizes.cumsum(0)
    return [
        (tokens[end[0] - size[0] : end[0]].tolist(), known[end[1] - size[1] : end[1]].tolist())
        for size, end in zip(sizes, ends, strict=True)
    ]


def _bytes(tensor: Tensor) -> bytes:
    """Of float32 values on the host."""
    return tensor.float().contiguous().numpy().tobytes()


def _tensors(told: Sequence[bytes], columns: int) -> list[Tensor]:
    """What :func:`_bytes` has packed, with so many columns."""
    return [torch.from_numpy(np.frombuffer(said, np.float32).copy()).view(-1, columns) for said in told]
