"""A recipe on a RunPod machine: `python launch/runpod_pod.py my.yaml s3://bucket/runs/my`.

Needs `pip install runpod`, RUNPOD_API_KEY, an image that RunPod can pull (the Dockerfile here) and the bucket's
credentials in the environment. The pod trains, copies its run to the bucket and stops itself; after exit 75, or on a
new pod, the same line goes on.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
from pathlib import Path

import runpod

#: Handed on to the pod, where they are there.
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "HF_TOKEN")


def line_of(recipe: Path, mirror: str) -> str:
    """The shell line of the pod: the recipe is in it, so that nothing has to be copied."""
    text = base64.b64encode(recipe.read_bytes()).decode()
    train = f"ftcli train {shlex.quote(recipe.name)} --set run.mirror={shlex.quote(mirror)}"
    again = f'until {train}; do s=$?; [ "$s" = 75 ] || break; done'
    written = f"echo {text} | base64 -d > {shlex.quote(recipe.name)}"
    return f"bash -c {shlex.quote(f'{written}; {again}; runpodctl stop pod $RUNPOD_POD_ID')}"


def main() -> None:
    """Makes the pod and prints what RunPod says of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("mirror")
    parser.add_argument("--gpu", default="NVIDIA H100 80GB HBM3")
    parser.add_argument("--image", default="ftcli:1.0.0")
    asked = parser.parse_args()
    runpod.api_key = os.environ["RUNPOD_API_KEY"]
    made = runpod.create_pod(
        name="ftcli",
        image_name=asked.image,
        gpu_type_id=asked.gpu,
        cloud_type="ALL",
        gpu_count=1,
        container_disk_in_gb=256,
        start_ssh=False,
        docker_args=line_of(asked.recipe, asked.mirror),
        env={name: os.environ[name] for name in CREDENTIALS if name in os.environ},
    )
    print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
