"""Tools whose recipes `ftcli recipes convert` turns into ours. One row each.

What their keys are called here stands once, in :mod:`ftcli.config.dialects`; the code of a row says what needs more
than another name, and which defaults of the tool are not ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the converter has to know of a tool.

    Attributes:
        title: Its name in messages, as in :mod:`ftcli.config.dialects`.
        marks: Keys that only its recipes have, at any depth: the tool with the most marks in a file is taken.
        code: The dialect's rules: a :class:`ftcli.config.conversion.rules.Rules`.
        proofs: Keys that outweigh all marks of others.
    """

    title: str
    marks: frozenset[str]
    code: str
    proofs: frozenset[str] = frozenset()


def words_of(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


TABLE: Mapping[str, Dialect] = MappingProxyType(
    {
        "axolotl": Dialect(
            "axolotl",
            words_of(
                "base_model sequence_len micro_batch_size num_epochs datasets val_set_size "
                "lora_target_linear sample_packing evals_per_epoch saves_per_epoch dataset_prepared_path "
                "test_datasets lr_scheduler"
            ),
            "ftcli.config.conversion.axolotl:RULES",
        ),
        "llama-factory": Dialect(
            "LLaMA-Factory",
            words_of(
                "finetuning_type stage cutoff_len template lora_target lora_rank dataset_dir do_train "
                "overwrite_cache preprocessing_num_workers plot_loss quantization_bit flash_attn peft_config "
                "dist_config kernel_config train_dataset model_class"
            ),
            "ftcli.config.conversion.llama_factory:RULES",
        ),
        "torchtune": Dialect(
            "torchtune",
            words_of(
                "_component_ checkpointer batch_size max_steps_per_epoch metric_logger lora_attn_modules "
                "enable_activation_checkpointing checkpoint_dir"
            ),
            "ftcli.config.conversion.torchtune:RULES",
            proofs=words_of("_component_"),
        ),
        "trl": Dialect(
            "TRL",
            words_of(
                "dataset_name use_peft max_length dataset_train_split dataset_test_split "
                "lora_target_modules dataset_text_field completion_only_loss assistant_only_loss "
                "packing_strategy attn_implementation"
            ),
            "ftcli.config.conversion.trl:RULES",
            proofs=words_of("dataset_mixture dataset_mixer use_peft dataset_name"),
        ),
        "unsloth": Dialect(
            "Unsloth",
            words_of(
                "max_seq_length model_name use_gradient_checkpointing training_type format_type "
                "random_state random_seed local_dataset train_on_completions load_in_4bit"
            ),
            "ftcli.config.conversion.unsloth:RULES",
        ),
    }
)


def names() -> tuple[str, ...]:
    """What ``--from`` may say."""
    return tuple(TABLE)


def row(name: str) -> Dialect:
    """The row of a tool."""
    return TABLE[name]
