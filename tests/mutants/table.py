"""The mutants: a file, a line of it, what it becomes, and the tests nearest to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Mutant:
    """``text`` stands in ``file`` once, and becomes ``instead``; ``tests`` (files below tests/) are to notice."""

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]

    def key(self, root: Path) -> str:
        """Digest of what the verdict depends on, as the files below ``root`` have it."""
        parts = [self.text, self.instead, *self.tests]
        parts += [(root / path).read_text(encoding="utf-8") for path in (self.file, *_files(self.tests))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]

    def problem(self, root: Path) -> str | None:
        """Why it cannot be applied: the text is not in the file, or not once; None where it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}"
        count = path.read_text(encoding="utf-8").count(self.text)
        if count != 1:
            return f"{self.name}: {self.file} has this {count} times and not once: {self.text!r}"
        missing = [test for test in _files(self.tests) if not (root / test).is_file()]
        return f"{self.name}: there is no {missing[0]}" if missing else None


def _files(tests: Iterable[str]) -> list[str]:
    return [f"tests/{test.partition('::')[0]}" for test in tests]


def _m(name: str, file: str, text: str, instead: str, *tests: str) -> Mutant:
    return Mutant(name, file, text, instead, tests)


_K, _E2E, _U = "kernels/ftkernels/", "e2e/test_", "unit/"

KERNELS = (
    _m(
        "RMSNorm's backward without the mean",
        _K + "norm_parts.py",
        "dx = rstd * (g - n * (tl.sum(g * n, axis=1) / H)[:, None])",
        "dx = rstd * (g - n * (tl.sum(g * n, axis=1))[:, None])",
        "ops/test_rms_norm.py",
    ),
    _m(
        "Llama's norm not rounded before the weight",
        _K + "norm_parts.py",
        "y = n.to(ROUND).to(ACC) * w",
        "y = n * w",
        "ops/test_rms_norm.py",
    ),
    _m(
        "rotation turned the wrong way back",
        _K + "rope_parts.py",
        "y1 = x1 * c1 + x2 * s2",
        "y1 = x1 * c1 - x2 * s2",
        "ops/test_rope.py",
    ),
    _m(
        "delta rule: the state read by documents that begin in the chunk",
        _K + "delta_rule_forward.py",
        "first_part = tl.where((document < row) | (document == 0), tl.exp(total), 0.0)",
        "first_part = tl.exp(total)",
        "ops/test_delta_rule.py",
    ),
    _m(
        "delta rule: the decay of the whole chunk without a gradient",
        _K + "delta_rule_backward.py",
        "d_total += tl.where(place == C - 1, end, 0.0)",
        "d_total += tl.where(place == C, end, 0.0)",
        "ops/test_delta_rule.py",
    ),
    _m(
        "delta rule: the same in float32",
        _K + "delta_rule_backward.py",
        "mask=row + place < S, other=0.0) + passed",
        "mask=row + place < S, other=0.0)",
        "ops/test_delta_rule.py",
    ),
    _m(
        "delta rule: tokens that are the earlier of a pair learn from it",
        _K + "delta_rule_backward.py",
        "owed = tl.dot(tl.where(later, 0.0, 1.0), owed, input_precision=PRECISION)",
        "owed = tl.dot(tl.where(later, 0.0, 1.0), owed, input_precision=PRECISION) + owed",
        "ops/test_delta_rule.py",
    ),
    _m(
        "causal convolution: gradients from the next document",
        _K + "causal_conv.py",
        "reads = (token >= begin) | ((token < 0) & (begin == 0))",
        "reads = token < S",
        "ops/test_causal_conv.py",
    ),
    _m(
        "one step of a convolution that forgets to shift",
        _K + "delta_step.py",
        "tl.store(at + w - 1, old",
        "tl.store(at + w, old",
        "ops/test_delta_step.py",
    ),
    _m(
        "window one key too wide",
        _K + "attention_mask.py",
        "lo = torch.maximum(lo, position - (self.window - 1))",
        "lo = torch.maximum(lo, position - self.window)",
        "ops/test_attention_mask.py",
    ),
    _m(
        "no derivative of the softcap in dQ",
        _K + "attention_backward.py",
        "weight *= 1.0 - x * x",
        "weight *= 1.0",
        "ops/test_attention.py",
    ),
    _m(
        "second backward of the loss reads what was spent",
        _K + "linear_cross_entropy.py",
        "if ctx.spent:  #",
        "if False:  #",
        "ops/test_linear_cross_entropy.py",
    ),
    _m(
        "accuracy of the last chunk only",
        _K + "linear_cross_entropy.py",
        "out.correct += result.correct.sum()",
        "out.correct.copy_(result.correct.sum())",
        "ops/test_linear_cross_entropy.py",
    ),
    _m(
        "label smoothing without its gradient",
        _K + "cross_entropy.py",
        "grad -= smooth / vocabulary",
        "grad -= 0.0",
        "ops/test_linear_cross_entropy.py",
    ),
    _m(
        "a tie in the label's own lane is not seen",
        _K + "cross_entropy.py",
        "beaten_near = tl.max((earlier & (u >= true_u)).to(tl.int32), axis=0)",
        "beaten_near = 0",
        "ops/test_linear_cross_entropy.py",
    ),
    _m(
        "adapters' gradients of the first share of the rows alone",
        _K + "thin_products.py",
        "first = split * b_rows",
        "first = 0 * b_rows",
        "ops/test_thin_products.py",
    ),
    _m(
        "dA without the weight of the norm in front",
        _K + "thin_products.py",
        'total *= 1.0 + w if FORM == "gemma" else w',
        'total *= 1.0 + w if FORM == "gemma" else 1.0',
        "ops/test_thin_products.py",
    ),
    _m(
        "greedy takes the last of equal tokens",
        _K + "sampling_kernels.py",
        "first = tl.min(tl.where(scores == largest, at, V), 0)",
        "first = tl.max(tl.where(scores == largest, at, -1), 0)",
        "ops/test_sampling.py",
    ),
    _m(
        "AdamW's second bias correction by the first beta",
        _K + "adamw.py",
        "(1.0 - self.beta2**self.step) ** -0.5",
        "(1.0 - self.beta1**self.step) ** -0.5",
        "ops/test_adamw.py",
    ),
    _m(
        "decoding without a softcap",
        _K + "decode_attention.py",
        'x = bounded(tl.dot(q, tl.trans(k), input_precision="ieee"), SCALE, SOFTCAP, FAST_TANH) * FACTOR',
        'x = bounded(tl.dot(q, tl.trans(k), input_precision="ieee"), SCALE, 0.0, FAST_TANH) * FACTOR',
        "ops/test_decode_attention.py",
    ),
    _m(
        "attention starts without its sink's weight",
        _K + "attention_parts.py",
        'return peak, tl.where(peak == float("-inf"), 0.0, 1.0)',
        "return peak, tl.zeros_like(peak)",
        "ops/test_attention_sinks.py",
    ),
    _m(
        "decoding counts a sink in every share",
        _K + "decode_attention.py",
        "counted = (group < GROUP) & (split == 0)",
        "counted = group < GROUP",
        "ops/test_decode_attention.py",
    ),
    _m(
        "the sinks' gradient is the other way",
        _K + "attention_backward.py",
        "return -(share * delta).sum((0, 2))",
        "return (share * delta).sum((0, 2))",
        "ops/test_attention_sinks.py",
    ),
    _m(
        "an output gate's gradient without its slope",
        _K + "output_gate.py",
        "d_gate = dy * x * share * sigmoid(-g)",
        "d_gate = dy * x * share",
        "ops/test_output_gate.py",
    ),
    _m(
        "ranks that share rows all take the first sinks",
        "ftcli/model/sequence_parallel.py",
        "return sinks.view(self.parts, -1)[self.part]",
        "return sinks.view(self.parts, -1)[0]",
        _U + "model/test_sequence_parallel.py::test_each_part_attends_with_the_sinks_of_its_heads",
    ),
    _m(
        "NF4 ties go to the upper entry",
        _K + "nf4.py",
        "torch.bucketize(scaled, middles, out_int32=True)",
        "torch.bucketize(scaled, middles, out_int32=True, right=True)",
        "ops/test_nf4.py",
    ),
    _m(
        "the plain form with Gemma's 1",
        _K + "norm_parts.py",
        "        y = n * w\n",
        "        y = n * (1.0 + w)\n",
        "ops/test_rms_norm.py",
    ),
    _m(
        "features that are not rotated paired as in a head that is rotated whole",
        _K + "rope_parts.py",
        "first = tl.where(d < ROT, d, d + ROT)",
        "first = d",
        "ops/test_qkv_options.py",
    ),
    _m(
        "values counted in the keys' norm over the width",
        _K + "qkv_width.py",
        "tl.where((head >= q_heads) & (head < normed), squares, 0.0)",
        "tl.where(head >= q_heads, squares, 0.0)",
        "ops/test_qkv_options.py",
    ),
    _m(
        "the width's norm backward without rstd in its mean",
        _K + "qkv_backward.py",
        "mean = rstd * group_sum(",
        "mean = group_sum(",
        "ops/test_qkv_options.py",
    ),
    _m(
        "a norm behind the rotation that is normalised in front of it",
        _K + "qkv_norm_rope.py",
        "        if AFTER:\n",
        "        if AFTER and DELTA and not DELTA:\n",
        "ops/test_qkv_options.py",
    ),
    _m(
        "The queries', keys' and values' one x A^T read as if each had its own",
        _K + "qkv_rope.py",
        "xa_at = xa_ptr + row64 * K if JOINED",
        "xa_at = xa_ptr + row64 * (3 * K) + part * K if JOINED",
        "ops/test_lora_joined.py",
    ),
    _m(
        "The gradient of one x A^T without the values' share",
        _K + "qkv_backward.py",
        "tl.store(dxa_at, dxa_q + dxa_k + dxa_v, mask=row_ok)",
        "tl.store(dxa_at, dxa_q + dxa_k, mask=row_ok)",
        "ops/test_lora_joined.py",
    ),
    _m(
        "The gradient of one x A^T without up's share",
        _K + "glu_kernels.py",
        "                dxa_g += tl.dot(du.to(DOT), bt_u",
        "                dxa_u += tl.dot(du.to(DOT), bt_u",
        "ops/test_lora_joined.py",
    ),
    _m(
        "ternary scale by the Euclidean norm",
        _K + "ternary.py",
        "torch.linalg.vector_norm(wide, 1,",
        "torch.linalg.vector_norm(wide, 2,",
        "ops/test_bitlinear.py",
    ),
)
DATA = (
    _m(
        "the first token of an answer bears no loss",
        "ftcli/labels.py",
        "end > start and start >= span[0]",
        "end > start and start > span[0]",
        _U + "data/test_boundary.py",
        _U + "data/test_prepare.py",
    ),
    _m(
        "loss beyond the stop token",
        "ftcli/labels.py",
        "labels[last + 1 : end] = [IGNORE_INDEX] * (end - last - 1)",
        "labels[end:end] = []",
        _U + "data/test_prepare.py",
    ),
    _m(
        "padding is attended to",
        "ftcli/data/collate.py",
        'batch["attention_mask"][index, :length] = 1',
        'batch["attention_mask"][index] = 1',
        _U + "data/test_prepare.py",
        _U + "train/test_packing.py",
    ),
    _m(
        "the first token of a packed document is a label",
        "ftcli/data/collate.py",
        'batch["labels"][index, start + 1 : end] = torch.tensor(tokens.labels[1:], dtype=torch.int64)',
        'batch["labels"][index, start:end] = torch.tensor(tokens.labels, dtype=torch.int64)',
        _U + "data/test_pack.py",
        _U + "train/test_packing.py",
    ),
    _m(
        "a rank without rows repeats a batch",
        "ftcli/data/order.py",
        "else [self.units]",
        "else batches[-1]",
        _U + "data/test_order.py",
    ),
    _m(
        "packs are not the fullest that have room",
        "ftcli/data/order.py",
        "room = size + (enough & -enough).bit_length() - 1",
        "room = size + enough.bit_length() - 1",
        _U + "data/test_pack.py",
    ),
    _m(
        "rows that fill no batch are lost",
        "ftcli/data/order.py",
        "for row in batch] + list(order[whole:])",
        "for row in batch]",
        _E2E + "sampling.py",
    ),
    _m(
        "an epoch of a mixture ends with its shortest source",
        "ftcli/data/order.py",
        "total = max(size / weight",
        "total = min(size / weight",
        _U + "data/test_pack.py",
        _U + "data/test_nothing_lost.py",
    ),
)
TRAIN = (
    _m(
        "weight decay on norms and biases",
        "ftcli/train/optimizer.py",
        "return set(get_parameter_names(model, [nn.LayerNorm], _UNDECAYED))",
        "return {name for name, _ in model.named_parameters()}",
        _U + "train/test_optimizer.py",
        _E2E + "optimizers.py",
    ),
    _m(
        "clipping at twice the limit",
        "ftcli/train/optimizer.py",
        "self.optimizer.clip = clipping(norm, limit)",
        "self.optimizer.clip = clipping(norm, 2 * limit)",
        _U + "train/test_optimizer.py",
        _U + "train/test_loop.py",
    ),
    _m(
        "a score that stays counts as better",
        "ftcli/train/optimizer.py",
        "1.0 - threshold if best > 0 else 1.0 + threshold",
        "1.0 - threshold",
        _U + "train/test_plateau.py",
    ),
    _m(
        "the schedule counts skipped steps",
        "ftcli/train/optimizer.py",
        "if done and not schedules.row(",
        "if not schedules.row(",
        _U + "train/test_optimizer.py",
        _E2E + "float16.py",
    ),
    _m(
        "a checkpoint of numbers that are not finite",
        "ftcli/train/loop.py",
        "self.parallel.reshard()\n        self.check_finite()",
        "self.parallel.reshard()",
        _U + "train/test_loop.py",
    ),
    _m(
        "evaluation moves the random states",
        "ftcli/train/loop.py",
        "states.restore()  #",
        "pass  #",
        _U + "train/test_loop.py",
    ),
    _m(
        "the logged loss is not a mean over steps",
        "ftcli/train/loop.py",
        "mean = self._loss_sum.item() / (self.step - self._logged_step)",
        "mean = self._loss_sum.item()",
        _U + "train/test_loop.py",
        _E2E + "train.py",
    ),
    _m(
        "what a failed step has drawn is kept",
        "ftcli/train/loop.py",
        "self.objective.undo(self.step)",
        "pass",
        _U + "train/test_loop.py",
        _E2E + "resilience_resume.py",
    ),
    _m(
        "the best checkpoint is rotated away",
        "ftcli/train/loop.py",
        "spared = (self.best.step,) if self.hooks.keep_best and self.best.value is not None else ()",
        "spared = ()",
        _E2E + "best.py",
    ),
    _m(
        "min_delta is not asked for",
        "ftcli/train/evaluation.py",
        "value < best - min_delta",
        "value < best",
        _E2E + "best.py",
        _U + "methods/grpo/test_stagnation.py",
    ),
    _m(
        "the last of equal evaluations is the best",
        "ftcli/train/evaluation.py",
        "if best is not None and value >= best:",
        "if best is not None and value > best:",
        _E2E + "best.py",
        _U + "methods/grpo/test_stagnation.py",
    ),
    _m(
        "all ranks draw alike",
        "ftcli/train/parallel.py",
        "* SEED_STRIDE + self.group.rank) % 2**63",
        "* SEED_STRIDE) % 2**63",
        _U + "train/test_parallel.py",
    ),
    _m(
        "other weights on another rank go unnoticed",
        "ftcli/train/parallel.py",
        "require_alike([float_of(row[0]) for row in gathered])",
        "pass",
        _U + "train/test_parallel.py",
    ),
    _m(
        "one checkpoint more is kept",
        "ftcli/run/checkpoint.py",
        "scan.usable[-max(1, keep_last) :]",
        "scan.usable[-keep_last - 1 :]",
        _U + "run/test_checkpoint.py",
    ),
    _m(
        "a file is renamed before it is on the disk",
        "ftcli/run/atomic.py",
        "os.fsync(file.fileno())\n        yield aside",
        "yield aside",
        _U + "run/test_atomic.py",
    ),
)
_POLICY = _U + "methods/grpo/test_policy.py"
_LOSSES = _U + "methods/grpo/test_losses.py"
METHODS = (
    _m(
        "groups of equal rewards keep their rounding",
        "ftcli/methods/grpo/losses.py",
        ".masked_fill(alike.repeat_interleave(group), 0.0)",
        "",
        _U + "methods/grpo/test_losses.py",
    ),
    _m(
        "advantages over the deviation of all",
        "ftcli/methods/grpo/losses.py",
        "deviation(groups, 1).repeat_interleave(group)",
        "deviation(total)",
        _U + "methods/grpo/test_losses.py",
    ),
    _m(
        "the mean of a group counts completions without a reward",
        "ftcli/methods/grpo/losses.py",
        "torch.nanmean(groups, dim=1)",
        "groups.nan_to_num().mean(1)",
        _U + "methods/grpo/test_losses.py",
    ),
    _m(
        "clipped by the other epsilon",
        "ftcli/methods/grpo/losses.py",
        "torch.clamp(ratio, 1 - low, 1 + high)",
        "torch.clamp(ratio, 1 - high, 1 + low)",
        _POLICY,
    ),
    _m(
        "KL without the ratio",
        "ftcli/methods/grpo/losses.py",
        "- (reference - log_probs) - 1) * ratio",
        "- (reference - log_probs) - 1)",
        _POLICY,
    ),
    _m(
        "a sequence's ratio is not a mean",
        "ftcli/methods/grpo/losses.py",
        "log_weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]",
        "log_weights = (log_ratio * mask).sum(-1)[:, None]",
        _POLICY,
    ),
    _m(
        "DAPO's tokens are those of one rollout",
        "ftcli/methods/grpo/losses.py",
        "* shape.micro_batches / shape.generated",
        "* shape.micro_batches",
        _LOSSES,
    ),
    _m(
        "stop strings of ASCII only",
        "ftcli/generation/requests.py",
        "_TOKENS_A_CHARACTER = 4",
        "_TOKENS_A_CHARACTER = 1",
        _U + "generation/test_requests.py",
    ),
    _m(
        "the self-check does not look at outputs",
        "ftcli/model/selfcheck.py",
        "return self.output <= tolerance.output and self.gradient",
        "return self.gradient",
        _U + "model/test_patch.py",
    ),
)
EXPORT = (
    _m(
        "GGUF: the norm of what a delta net gives is shifted",
        "ftcli/gguf.py",
        'part.endswith("norm") and part != "ssm_norm"',
        'part.endswith("norm")',
        _U + "export/test_gguf.py::test_delta_nets_are_as_llama_cpps_converter_has_them",
    ),
    _m(
        "GGUF: value heads of a key head stay together",
        "ftcli/gguf.py",
        "split.transpose(0, 1).flatten(0, 2).contiguous()",
        "split.flatten(0, 2).contiguous()",
        _U + "export/test_gguf.py::test_delta_nets_are_as_llama_cpps_converter_has_them",
    ),
    _m(
        "a full fine-tune's heads for further tokens are the base's of today",
        "ftcli/export/further.py",
        "return alone or (source.folder / FURTHER_WEIGHTS).is_file()",
        "return alone",
        _E2E + "families.py::test_heads_that_transformers_passes_over_are_in_what_is_exported",
    ),
    _m(
        "that heads for further tokens are missing is not said",
        "ftcli/export/further.py",
        'return [_lacking(f"{source.folder} has none of its own',
        'return [] and [_lacking(f"{source.folder} has none of its own',
        _E2E + "families.py::test_that_a_checkpoints_heads_for_further_tokens_are_gone_with_its_base_is_said",
    ),
    _m(
        "merged weights may be far off",
        "ftcli/export/verify.py",
        "room = 2 * UNIT_ROUNDOFF[dtype]",
        "room = 2000 * UNIT_ROUNDOFF[dtype]",
        _U + "export/test_compare.py",
    ),
    _m(
        "what was not merged may differ",
        "ftcli/export/verify.py",
        "exact = change is None or change.whole is not None",
        "exact = False",
        _U + "export/test_compare.py",
    ),
    _m(
        "foreign tensors pass",
        "ftcli/export/verify.py",
        'problems += [f"{name} is not in the base model" for name in sorted(foreign)]',
        "problems += []",
        _U + "export/test_compare.py",
    ),
    _m(
        "float16 overflows in silence",
        "ftcli/export/merge.py",
        "if dtype == torch.float16 and tensor.dtype != dtype:",
        "if False:",
        _U + "export/test_merge.py",
    ),
    _m(
        "GGUF adapters keep only alpha over rank",
        "ftcli/export/gguf/write.py",
        "factor = scale / (alpha / a.shape[0])",
        "factor = 1.0",
        _U + "export/test_gguf_adapter.py",
    ),
    _m(
        "GGUF keeps YaRN's attention factor",
        "ftcli/export/gguf/rotation.py",
        'if rope.get("attention_factor") and',
        'if rope.get("nothing") and',
        _U + "export/test_gguf.py",
    ),
    _m(
        "GGUF knows where exaone4 has windows",
        "ftcli/export/gguf/metadata.py",
        "architecture.windowed_at in (None, layers)",
        "layers > 0",
        _U + "export/test_gguf.py",
    ),
    _m(
        "another answer is no disagreement",
        "ftcli/export/verify.py",
        "firm_disagreements=int((firm & ~same).sum())",
        "firm_disagreements=0",
        _U + "export/test_compared_logits.py",
    ),
)
CHECKS = (
    _m(
        "--set is cut at the last =",
        "ftcli/config/overrides.py",
        'override.text.partition("=")',
        'override.text.rpartition("=")',
        _U + "config/test_load.py",
    ),
    _m(
        "rows as long as the model's positions are refused",
        "ftcli/preflight/checks/model.py",
        "if limit is not None and asked > limit:\n        yield context.error(",
        "if limit is not None and asked >= limit:\n        yield context.error(",
        _U + "preflight/test_model.py",
    ),
    _m(
        "a T4 computes in bfloat16",
        "ftcli/plan/precision.py",
        '"bfloat16" if device.has_bfloat16 else "float32"',
        '"bfloat16"',
        _U + "facts/test_device.py",
        _U + "preflight/test_stages.py",
    ),
    _m(
        "an interrupted run has failed",
        "ftcli/run/status.py",
        "in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)",
        "in (ExitCode.PREEMPTED,)",
        _U + "run/test_resume.py",
    ),
)
_L, _UL = "ftcli/methods/kto/", _U + "methods/kto/test_"

KTO = (
    _m("kto: the KL below 0", _L + "objective.py", "torch.relu(total / max(len(made), 1)).float()",
       "(total / max(len(made), 1)).float()", _UL + "objective.py"),
    _m("kto: the mean of a micro-batch", _L + "objective.py",
       "loss = self._loss.values(answers).sum() / step.pairs", "loss = self._loss.values(answers).mean()",
       _UL + "objective.py"),
    _m("kto: the KL of this rank's rows alone", _L + "objective.py",
       "size = self._size * self._accumulation * self._ranks", "size = self._size * self._accumulation",
       _UL + "objective.py"),
    _m("kto: ranks that share a row count its mismatched answers twice", _L + "objective.py",
       "if number < len(batches) and self._counts:", "if number < len(batches):",
       _E2E + "kto.py::test_ranks_with_shards_or_shared_rows_are_one_process"),
    _m("kto: the KL under dropout", _L + "objective.py", "with without_dropout(self._model), computing:",
       "with computing:", _UL + "objective.py"),
    _m("kto: bad answers pulled up", _L + "losses.py",
       "torch.sigmoid(-how.beta * answers.labels * (answers.gained - answers.kl))",
       "torch.sigmoid(-how.beta * (answers.gained - answers.kl))", _UL + "losses.py"),
    _m("kto: an answer held against its own prompt", _L + "reference.py",
       "found[here] = found[after] if prompts[here] == prompts[after] else after", "found[here] = after",
       _UL + "order.py"),
    _m("kto: pairs pass on good answers alone", _L + "reference.py",
       "order = sorted(range(len(rows)), key=lambda number: -rows[number].value)", "order = list(range(len(rows)))",
       _UL + "order.py"),
    _m("kto: the mismatched rows of the first epoch in all of them", _L + "reference.py",
       "order = epochs.order(epoch)", "order = epochs.order(0)", _UL + "reference.py"),
    _m("kto: the KL against a reference that is computed all the same", _L + "objective.py",
       "known = known_of(self._known, documents).to(self._device) if self._is_known else None", "known = None",
       _UL + "reference.py"),
    _m("kto: a run that began live goes on with a cache", _L + "objective.py",
       'super().restore({"reference": "live", **state}, progress)', 'super().restore(state, progress)',
       _UL + "reference.py"),
    _m("kto: a mismatched row without end", _L + "reference.py", "ids[:longest], labels[:longest]", "ids, labels",
       _UL + "order.py"),
    _m("kto: labels in the order of the file", _L + "order.py",
       "return Epochs(table, Mixture(sizes, counts, weighted=True), packs, seed)",
       "return Epochs(table, Mixture((len(table),), (len(table),)), packs, seed)", _UL + "order.py"),
    _m("kto: a bad answer as a task's reference", "ftcli/data/asked.py", "if made.value < 0:", "if made.value < -2:",
       _UL + "rows.py"),
)  # fmt: skip

_P, _UP = "ftcli/methods/preference/", _U + "methods/preference/test_"

PREFERENCE = (
    _m(
        "pairs: the reference with its adapters left on",
        _P + "objective.py",
        "with without_dropout(model), of_reference(self._reference, self._model), computing:",
        "with without_dropout(model), computing:",
        _UP + "objective.py",
    ),
    _m(
        "pairs: dropout in the reference",
        _P + "objective.py",
        "with without_dropout(model), of_reference(self._reference, self._model), computing:",
        "with of_reference(self._reference, self._model), computing:",
        _UP + "objective.py",
    ),
    _m(
        "pairs: the mean of a micro-batch",
        _P + "objective.py",
        "loss = (self._loss.weighed_values(answers, policy.aligned) * weights).sum() / step.pairs",
        "loss = (self._loss.values(answers) * weights).mean()",
        _UP + "objective.py",
    ),
    _m(
        "pairs: cross-entropy of both answers",
        _P + "objective.py",
        "(policy.sums[0::2] * weights).sum() / step.supervised",
        "(policy.sums.view(-1, 2).sum(1) * weights).sum() / step.supervised",
        _UP + "trl.py",
    ),
    _m(
        "pairs: a blank micro-batch counts in metrics",
        _P + "objective.py",
        "return self.noted(loss, pair_sums(answers, self._loss, weights))",
        "return self.noted(loss, pair_sums(answers, self._loss, torch.ones_like(weights)))",
        _UP + "objective.py",
    ),
    _m(
        "pairs: a failed step stays in the sums",
        "ftcli/train/epochs.py",
        "        self._sums = self._before\n",
        "        self._before = self._sums\n",
        _UP + "objective.py",
    ),
    _m(
        "pairs: long answers weighed in the policy alone",
        _P + "objective.py",
        "compared = zeros if reference is None else reference.weighed",
        "compared = zeros if reference is None else reference.sums",
        _UP + "trl.py",
    ),
    _m(
        "pairs: IPO of whole answers",
        _P + "losses.py",
        "return (answers.mean_difference - 1 / (2 * how.beta)) ** 2",
        "return (answers.difference - 1 / (2 * how.beta)) ** 2",
        _UP + "losses.py",
    ),
    _m(
        "pairs: smoothing dropped",
        _P + "losses.py",
        "return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)",
        "return -F.logsigmoid(scaled)",
        _UP + "losses.py",
    ),
    _m(
        "pairs: ORPO's odds where an answer is certain",
        _P + "losses.py",
        "    x = x.clamp(max=-1e-7)\n",
        "",
        _UP + "losses.py",
    ),
    _m(
        "pairs: a tie counts as wrong",
        _P + "figures.py",
        "right = (one > other).float() + 0.5 * (one == other).float()",
        "right = (one > other).float()",
        _UP + "losses.py",
    ),
    _m(
        "pairs: half of an overlong one stays",
        "ftcli/data/encode.py",
        "if len(kept) == len(fitted) and not alike:",
        "if kept and not alike:",
        _UP + "rows.py",
    ),
    _m(
        "reference: rows that ranks share found among whole ones",
        _P + "cache.py",
        '"rows": [rows, shares],',
        '"rows": [rows],',
        _UP + "sharded.py",
    ),
    _m(
        "reference: joined weights left out of the key",
        _P + "cache.py",
        'found["weight"] = module.weight',
        "pass",
        _UP + "sharded.py",
    ),
    _m(
        "reference: shards in place of weights in the key",
        _P + "cache.py",
        "    unit.unshard()\n",
        "",
        _UP + "sharded.py",
    ),
    _m(
        "reference: of ranks that share a row each adds its log-probability",
        _P + "reference.py",
        "if turn.found is not None and (sequence is None or sequence.part == 0):",
        "if turn.found is not None:",
        _E2E + "reference_ranks.py::test_ranks_that_share_rows_keep_their_own_and_go_on_alike",
    ),
    _m(
        "reference: scored with what has been trained",
        _P + "reference.py",
        'return as_base(self.model) if hasattr(self.model, "disable_adapter") else nullcontext()',
        "return nullcontext()",
        _UP + "cache.py",
    ),
    _m(
        "reference: another model stays beside the trained one",
        "ftcli/train/other_model.py",
        "    gc.collect()  # its modules know each other\n",
        "",
        _UP + "other_model.py",
    ),
    _m(
        "reference: another model's tokens are never looked at",
        "ftcli/train/other_model.py",
        "used = {at for table in tables for row in table for at in alone.intersection(row.input_ids)}",
        "used = set[int]()",
        _UP + "other_model.py",
    ),
    _m(
        "reference: another model is the model without adapters in evaluation",
        _P + "evaluate.py",
        'hasattr(model, "disable_adapter") and not self.gone',
        'hasattr(model, "disable_adapter")',
        _UP + "other_model.py",
    ),
    _m(
        "reference: another model's files may change",
        "ftcli/run/inputs.py",
        'findings += _base_findings(map_in(known, "asked"), now.asked or Inputs(), "the reference")',
        "findings += []",
        _E2E + "other_reference.py::test_a_run_is_held_to_its_files",
    ),
    _m(
        "pairs: a policy that is compared with another model begins anywhere",
        _P + "objective.py",
        "held = reference if self._other is None else start",
        "held = reference if self._other is None else None",
        _UP + "other_model.py",
    ),
    _m(
        "pairs: held-out ones against the model itself",
        _P + "evaluate.py",
        "if not self._is_beside(model):",
        "if self.reference is None:",
        _E2E + "preference.py",
    ),
    _m(
        "pairs: a tie by length is wrong",
        "ftcli/evaluate/margins.py",
        "np.where(values == 0, 0.5,",
        "np.where(values == 0, 0.0,",
        _U + "evaluate/test_margins.py",
    ),
    _m(
        "pairs: longer answers count as often as they are chosen",
        "ftcli/evaluate/margins.py",
        "total += count * sum(float(side.mean()) for side in sides) / len(sides)",
        "total += sum(float(side.sum()) for side in sides)",
        _U + "evaluate/test_margins.py",
    ),
    _m(
        "pairs: one held-out row in place of those of another rank",
        "ftcli/evaluate/margins.py",
        "rows // batch_size % group.size, rows",
        "rows % group.size, rows",
        _U + "evaluate/test_margins.py",
    ),
    _m(
        "pairs: a row that is measured again to fill a turn counts",
        "ftcli/evaluate/margins.py",
        "torch.where(there.isnan(), found, there)",
        "found",
        _U + "evaluate/test_margins.py",
    ),
    _m(
        "pairs: a resumed run has forgotten what was before",
        "ftcli/train/evaluation.py",
        'self.margins = map_in(read_json_object(run.margins_path), "before")',
        "pass",
        _E2E + "margins.py",
    ),
    _m(
        "pairs: an answer that was cut off ends",
        _P + "figures.py",
        "return torch.where(ends, policy, unknown), torch.where(ends, change, unknown)",
        "return policy, change",
        _UP + "figures.py",
    ),
    _m(
        "pairs: every rank of a shared row counts its loss",
        "ftcli/train/epochs.py",
        "return loss if self._counts else loss - loss.detach()",
        "return loss",
        _UP + "shared_rows.py",
    ),
    _m(
        "pairs: every rank of a shared row counts in metrics",
        "ftcli/train/epochs.py",
        "sums if self._counts else torch.zeros_like(sums)",
        "sums",
        _UP + "shared_rows.py",
    ),
    _m(
        "pairs: the loss of a part of an answer",
        _P + "pairs.py",
        "found = tuple(sequence.summed(torch.stack(found)))",
        "pass",
        _UP + "shared_rows.py",
    ),
    _m(
        "pairs: tokens of shared rows in another part",
        _P + "pairs.py",
        "part == sequence.part)",
        "part != sequence.part)",
        _UP + "shared_rows.py",
    ),
    _m(
        "pairs: a rank scores the start again alone",
        _P + "objective.py",
        "return max(float_of(row[0]) for row in group.agree(",
        "return difference + 0 * max(float_of(row[0]) for row in group.agree(",
        _UP + "shared_rows.py",
    ),
    _m(
        "a sharded reference keeps its embedding gathered",
        "ftcli/model/fsdp.py",
        "again = None if any(p.requires_grad for p in model.parameters()) else True",
        "again = None",
        _UP + "sharded.py",
    ),
    _m(
        "shared prompts: a tile that one query's hole covers is skipped",
        _K + "attention_parts.py",
        "tl.min(tl.where(inside, hole_hi, FAR), 0) // BLOCK, skip)",
        "tl.max(tl.where(inside, hole_hi, 0), 0) // BLOCK, skip)",
        "ops/test_attention_branches.py",
    ),
    _m(
        "shared prompts: windows count tokens between",
        _K + "attention_mask.py",
        "reach, reach - (begins - fork))",
        "reach, reach)",
        "ops/test_attention_branches.py",
    ),
    _m(
        "shared prompts: a first token from the end of the other answer",
        "ftcli/data/collate.py",
        "        positions.append(at[scored])\n",
        "        positions.append(at[scored + 1] - 1)\n",
        _U + "data/test_shared.py",
    ),
    _m(
        "shared prompts: positions go on from the other answer",
        "ftcli/data/collate.py",
        "np.arange(first, first + len(ids))",
        "np.arange(begin - document, begin - document + len(ids))",
        _U + "train/test_shared_prompts.py",
    ),
    _m(
        "shared prompts: an answer sees the one before it",
        "ftcli/model/masks.py",
        "            branch_starts=self.branches,\n",
        "            branch_starts=None,\n",
        _U + "train/test_shared_prompts.py",
    ),
    _m(
        "modules that are trained whole stay in the reference",
        "ftcli/model/initial_adapters.py",
        "        module.enable_adapters(False)\n",
        "        module.enable_adapters(True)\n",
        _UP + "objective.py",
    ),
)

SAMPLING = (
    _m(
        "sampling: an answer that was cut off is learnt",
        "ftcli/pipeline/sample_rows.py",
        "whole = not one.said.cut or",
        "whole = True or",
        _U + "pipeline/test_sample_rows.py",
    ),
    _m(
        "sampling: what a kill left of a group stays",
        "ftcli/run/samples.py",
        "count % self._group",
        "0",
        _U + "run/test_samples.py",
    ),
    _m(
        "sampling: scores of answers that are gone stay",
        "ftcli/run/samples.py",
        "if alone or self.count < len(keys):",
        "if self.count < len(keys):",
        _U + "run/test_samples.py",
    ),
    _m(
        "sampling: all answers of a prompt from the same random numbers",
        "ftcli/pipeline/sample_answers.py",
        "row_seed(seed, at, turn)",
        "row_seed(seed, at, 0)",
        _E2E + "sample.py::test_rows_train_without_editing",
    ),
    _m(
        "sampling: reasoning goes into the text alone",
        "ftcli/data/generated.py",
        '{"reasoning_content": said.reasoning} if said.reasoning else {}',
        "{}",
        _U + "data/test_generated.py",
    ),
)

_CACHE, _STATES = "ftcli/generation/cache.py", _U + "generation/test_states.py"

GENERATION = (
    _m(
        "states: prompts of a call leave theirs in each other's slots",
        _CACHE,
        "pools.matrices.index_copy_(0, prompts.slots, ",
        "pools.matrices.index_copy_(0, prompts.slots.flip(0), ",
        _STATES,
    ),
    _m(
        "states: a filter's last inputs in each other's slots",
        _CACHE,
        "pools.inputs.index_copy_(0, prompts.slots, ",
        "pools.inputs.index_copy_(0, prompts.slots.flip(0), ",
        _STATES,
    ),
    _m(
        "states: a filter's last inputs one token early",
        _CACHE,
        "last = inputs_at(parts.mixed, weights.filter.shape[1], ends, starts)",
        "last = inputs_at(parts.mixed, weights.filter.shape[1], (ends - 1).clamp(min=0), starts)",
        _STATES,
    ),
    _m(
        "states: a filter's last inputs in the order of the filter before",
        _K + "causal_conv.py",
        "torch.arange(2 - width, 1, device=x.device)",
        "torch.arange(1 - width, 0, device=x.device)",
        _STATES,
    ),
    _m(
        "states: a filter's last inputs reach into the prompt before",
        _K + "causal_conv.py",
        "torch.where((source >= begins[:, None])[..., None], ",
        "torch.where((source >= 0)[..., None], ",
        _STATES,
    ),
    _m(
        "states: matrices after a prompt but for its last token",
        _CACHE,
        "made = delta_rule_ends(*heads_of(filtered, sizes), *gates, ends, starts",
        "made = delta_rule_ends(*heads_of(filtered, sizes), *gates, (ends - 1).clamp(min=0), starts",
        _STATES,
    ),
    _m(
        "states: a row steps on in another row's slot",
        "ftcli/generation/decoding.py",
        "np.array([row.slot for row in rows] + [NO_SLOT]",
        "np.array([row.slot for row in rows[::-1]] + [NO_SLOT]",
        _STATES,
    ),
    _m(
        "states: empty rows step on in the first slot",
        "ftcli/generation/decoding.py",
        "[row.slot for row in rows] + [NO_SLOT] * (size - count)",
        "[row.slot for row in rows] + [rows[0].slot if rows else 0] * (size - count)",
        _STATES,
    ),
    _m(
        "states: rows that moved up keep the slots of their places",
        "ftcli/generation/decoding.py",
        "        self._put(self.slots, np",
        "        if first_tokens is not None:\n            self._put(self.slots, np",
        _STATES,
    ),
    _m(
        "states: completions of a prompt share its slot",
        "ftcli/generation/engine.py",
        "            slot = self._tools.slots.take()\n",
        "",
        _STATES,
    ),
    _m(
        "states: the first completion takes the prompt's own slot, from which the others are copied later",
        "ftcli/generation/engine.py",
        "last = started.begun + 1 == len(request.seeds)",
        "last = started.begun == 0",
        _STATES,
    ),
    _m(
        "states: nothing is copied for a completion",
        "ftcli/generation/engine.py",
        "            copied_slots.add(started.slot, slot)\n",
        "",
        _STATES,
    ),
    _m(
        "states: a copy without the filter's inputs",
        _CACHE,
        "for pool in (states.inputs, states.matrices):",
        "for pool in (states.matrices,):",
        _STATES,
    ),
    _m(
        "states: a copy in the first delta net alone",
        _CACHE,
        "        for states in self._states:\n",
        "        for states in self._states[:1]:\n",
        _STATES,
    ),
    _m(
        "states: prompts are given the copies' states",
        "ftcli/generation/engine.py",
        "tools.cache.copy_states(slots.sources, slots.targets)",
        "tools.cache.copy_states(slots.targets, slots.sources)",
        _STATES,
    ),
    _m(
        "states: a slot that is given back is still its row's",
        "ftcli/generation/engine.py",
        "        self._tools.slots.give_back(one.slot)\n",
        "",
        _STATES,
    ),
)

TABLE: dict[str, tuple[Mutant, ...]] = {
    "kernels": KERNELS,
    "data": DATA,
    "train": TRAIN,
    "methods": METHODS,
    "preference": PREFERENCE,
    "sampling": SAMPLING,
    "generation": GENERATION,
    "kto": KTO,
    "export": EXPORT,
    "checks": CHECKS,
}


def chosen(only: Sequence[str]) -> list[Mutant]:
    """All mutants, or those of the sections, names and files that contain one of ``only``."""
    return [
        mutant
        for section, mutants in TABLE.items()
        for mutant in mutants
        if not only or any(word in f"{section}\n{mutant.name}\n{mutant.file}" for word in only)
    ]
