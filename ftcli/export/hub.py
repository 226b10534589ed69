"""Uploads exports to the Hugging Face Hub: what was verified, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.errors import ExitCode, FtcliError, first_line
from ftcli.export.writing import ExportResult
from ftcli.facts.config_file import hub_errors


def push(results: Sequence[ExportResult], repo: str) -> str:
    """Upload each export into ``repo``, which is made if it is not there: one to its root, several to a folder each.

    Returns:
        The repository's address.

    Raises:
        FtcliError: FT755 (exit 2) for one that was not verified, (exit 3) when the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    unproved = [result.format for result in results if "verified" in result.verification.facts]
    if unproved:
        raise _refused(f"{unproved[0]} was written with --no-verify", ExitCode.RECIPE, "leave --no-verify out")
    api = HfApi()
    try:
        address = api.create_repo(repo, exist_ok=True, private=True)
        for result in results:
            folder = None if len(results) == 1 else result.format
            said = f"{result.format}, verified by ftcli"
            api.upload_folder(repo_id=repo, folder_path=result.path, path_in_repo=folder, commit_message=said)
    except hub_errors() as error:
        help = "log in with `hf auth login`, check the name and the network; the export itself is complete"
        raise _refused(first_line(error), ExitCode.PREFLIGHT, help) from error
    return str(address)


def _refused(reason: str, exit_code: ExitCode, help: str) -> FtcliError:
    return FtcliError.single("FT755", f"nothing more is uploaded: {reason}", exit_code=exit_code, help=help)
