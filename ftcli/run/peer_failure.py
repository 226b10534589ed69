"""How a rank tells the others why it has failed, and the errors that they end with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.plain import JsonObject
from ftcli.ranks import Place, lost_name
from ftcli.run.out_of_memory import is_out_of_memory

#: What torch says of connections that are closed, cut or silent, whichever library they are of.
_OF_CONNECTIONS = ("gloo", "NCCL", "nccl", "Connection closed", "communicator")


class PeerFailed(FtcliError):
    """Another rank has failed, and this one ends with it: that one's findings and exit code."""


class RankLost(FtcliError):
    """A rank was killed, or hangs (FT710, exit 75).

    Attributes:
        ranks: Which ones; none where that is not known.
        how: "was killed by SIGKILL", say.
    """

    def __init__(self, ranks: Sequence[int], how: str, who: str = "a rank") -> None:
        """``who`` it is where no ranks are named."""
        self.ranks, self.how = ranks, how
        if ranks:
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        finding = Finding(
            "FT710",
            f"{who} {how}: no rank can go on without it",
            help="start the same command again: it goes on from the last checkpoint. docs/multi-gpu.md says where to "
            "look for the reason",
        )
        super().__init__([finding], ExitCode.PREEMPTED)


def reasons(error: BaseException) -> tuple[ExitCode, Sequence[Finding]]:
    """The exit code and the findings of a failure."""
    if isinstance(error, FtcliError):
        return error.exit_code, error.findings
    text = f"{type(error).__name__}: {first_line(error)[:300]}"
    if is_out_of_memory(error):
        help = "lower train.per_device_train_batch_size or data.max_seq_len; `ftcli check` says what fits"
        return ExitCode.OUT_OF_MEMORY, (Finding("FT192", f"out of memory: {text}", help=help),)
    help = "run it again with --debug: the rank prints its traceback"
    return ExitCode.BUG, (Finding("FT190", f"this is a bug in ftcli: {text}", help=help),)


def as_json(finding: Finding) -> JsonObject:
    """A finding for another process, which has no files to show lines of."""
    origin = "" if finding.origin is None else f"{finding.origin}: "
    return {**asdict(finding), "message": f"{origin}{finding.message}", "origin": None}


def is_of_connections(error: RuntimeError) -> bool:
    """Whether an error says that another rank cannot be reached any more."""
    return not is_out_of_memory(error) and any(word in str(error) for word in _OF_CONNECTIONS)


def from_json(text: str | bytes) -> PeerFailed:
    """The failure of a rank that it has told with findings as :func:`as_json` makes them, and with its number."""
    said = json.loads(text)
    findings = [Finding(**{**raw, "origin": None}) for raw in said["findings"]]
    named = [Finding(f.code, f"rank {said['rank']}: {f.message}", None, f.help, f.severity) for f in findings]
    return PeerFailed(named, ExitCode(said["exit_code"]))


def killed(place: Place) -> RankLost | None:
    """The first rank that was lost, as ftcli's own launcher has seen it."""
    if place.folder is None:
        return None
    for rank in range(place.size):
        with contextlib.suppress(OSError):
            how = (place.folder / lost_name(rank)).read_text(encoding="utf-8")
            if how:  # else the launcher is just writing it
                return RankLost([rank], how)
    return None
