"""A recipe on Modal: `MIRROR=s3://bucket/runs/my modal run launch/modal_app.py --recipe my.yaml`.

Modal restarts a function whose machine was taken away; after exit 75 it is called again. The run lies in a volume, and
in a bucket where MIRROR names one (with a secret `bucket` that holds its credentials).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import modal

app = modal.App("ftcli")
root = Path(__file__).resolve().parent.parent
image = modal.Image.from_dockerfile(root / "Dockerfile", context_dir=root).entrypoint([])
runs = modal.Volume.from_name("ftcli-runs", create_if_missing=True)
mirror = os.environ.get("MIRROR", "")
secrets = [modal.Secret.from_name("bucket")] if mirror else []

#: The recipe went as far as it came: the same call goes on.
PREEMPTED = 75


@app.function(
    image=image,
    gpu="H100",
    volumes={"/runs": runs},
    secrets=secrets,
    timeout=24 * 3600,
    retries=modal.Retries(max_retries=10, initial_delay=10.0),
    single_use_containers=True,
)
def train(recipe: str, text: str, mirror: str) -> int:
    """Trains a recipe in the volume; the exit status of ftcli. An error, and so another call, after exit 75."""
    folder = Path("/runs")
    (folder / recipe).write_text(text, encoding="utf-8")
    more = ["--set", f"run.mirror={mirror}"] if mirror else []
    status = subprocess.run(["ftcli", "train", recipe, *more], cwd=folder, check=False).returncode
    runs.commit()
    if status == PREEMPTED:
        raise RuntimeError("preempted; called again")
    return status


@app.local_entrypoint()
def main(recipe: str) -> None:
    """Reads the recipe here and trains it there."""
    path = Path(recipe)
    raise SystemExit(train.remote(path.name, path.read_text(encoding="utf-8"), mirror))
