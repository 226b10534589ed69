"""The answer of `ftcli bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ftcli.plain import FLATTENED, JsonObject
from ftcli.plan.batches import Layout
from ftcli.plan.memory.checkpointing import Offloaded
from ftcli.tables import quantizations
from ftcli.tables.policies import PolicyName

if TYPE_CHECKING:
    from ftcli.model.selfcheck import SelfCheck
    from ftcli.train.bench import DeviceMemory, GpuTime, ProfiledKernel


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a step (median, fastest, slowest) after the first, which is given in seconds.

    ``tokens_per_second`` counts real tokens: of steps of one size by their median, of steps of several sizes all their
    tokens in all their time.

    ``first_step_only``: no other was timed, and the numbers are its own, with all that is set up in it.
    ``pairs_per_second`` is there where pairs of rows are learnt from; tokens that a pair shares count once then, where
    they are computed once.
    """

    steps: int
    first_step_only: bool
    tokens_per_second: float
    step_ms: float
    step_ms_min: float
    step_ms_max: float
    first_step_seconds: float
    peak_memory_bytes: int | None
    pairs_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """The tokens of the steps that were timed: real ones, and all that were computed, with what fills rows up.

    ``shapes`` is the number of different shapes of micro-batches, ``layout`` how their rows are laid out.
    """

    real_tokens: int
    computed_tokens: int
    computed_tokens_per_second: float
    filler_share: float
    shapes: int
    layout: Layout
    layout_reason: str


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """Several GPUs that train together, as against the same ones when each trained alone, at the same time; None where
    they share each row, which none can train on alone.

    Attributes:
        gpus: How many there are.
        tokens_per_second_in_all: Of all of them, at the pace of the slowest.
        tokens_per_second_alone: The sum of what each achieved alone.
        tokens_per_second_of_each_alone: What that is the sum of: the slowest sets the pace of all.
        share_of_single_gpus: The first over the second. These three are None where the weights are sharded over the
            GPUs, of which none can train alone.
        peak_memory_bytes_of_each: The most that each needed.
    """

    gpus: int
    tokens_per_second_in_all: float
    tokens_per_second_alone: float | None
    tokens_per_second_of_each_alone: tuple[float, ...]
    share_of_single_gpus: float | None
    peak_memory_bytes_of_each: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """The kernels of one step by time, and how long the GPU worked; None where no step was profiled."""

    profile: list[ProfiledKernel] | None
    gpu_time: GpuTime | None


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Pinned memory on the host, and which tensors of the layers it holds; None where there is no estimate."""

    pinned_host_bytes: int | None
    offloaded: Offloaded | None


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of training steps or of evaluation batches; the latter have fewer.

    ``matmul_tflops`` is the rate of a large dense product on this machine; ``cuda_graphs`` is ``on``, or says why not.
    """

    timing: Timing = field(metadata=FLATTENED)
    computing: TimedTokens = field(metadata=FLATTENED)
    device_memory: DeviceMemory | None = field(metadata=FLATTENED)
    matmul_tflops: float
    profiled: ProfiledStep | None = field(metadata=FLATTENED)
    kernels: str
    self_check: SelfCheck | None
    cuda_graphs: str
    host: HostMemory | None = field(metadata=FLATTENED)
    several: SeveralGpus | None = None


@dataclass(frozen=True, slots=True)
class StoredRate:
    """Products of weights as they are stored: the method that has them here, their rate, and the share of a step's
    operations that run at it. ``method`` is None where there are none.
    """

    method: str | None = None
    tflops: float = 0.0
    share: float = 0.0

    def as_dict(self) -> JsonObject:
        """Both numbers under the name of each method that can have such products."""
        found: JsonObject = {}
        for name in quantizations.multiplied_as_stored():
            tflops, share = (self.tflops, self.share) if name == self.method else (None, None)
            found |= {f"{name}_matmul_tflops": tflops, f"{name}_share_of_operations": share}
        return found


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """The memory estimate of what is timed; of fewer layers than the model has there is none.

    ``predicted_allocated_bytes`` is what ``peak_memory_bytes`` measures on a GPU, the allocator's peak;
    ``predicted_peak_bytes`` has what CUDA takes itself besides. On a CPU the peak is the whole process', as is the
    latter.
    """

    predicted_peak_bytes: int | None = None
    predicted_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ArithmeticBound:
    """The arithmetic bound, and tokens per second as a share of it; None where the operations are not known."""

    flops_per_token: float | None = None
    bound_tokens_per_second: float | None = None
    share_of_bound: float | None = None


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The answer of `ftcli bench`: the run, its measurements, and the numbers to compare them with."""

    recipe: str
    mode: Literal["training", "evaluation"]
    model: str
    device: str
    dtype: str
    batch: int
    seq: int
    lengths: str | None
    layers: int | None
    gradient_checkpointing: PolicyName
    uncheckpointed_layers: int
    measured: Measured = field(metadata=FLATTENED)
    stored: StoredRate = field(metadata=FLATTENED)
    predicted: PredictedMemory = field(metadata=FLATTENED)
    bound: ArithmeticBound = field(metadata=FLATTENED)
