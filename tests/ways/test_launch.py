"""The launchers in launch/: held to the schemas of their tools, and run with stand-ins for what lies elsewhere.

``make_schemas.py`` writes the schemas from the tools' own packages.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("schemas").joinpath(f"{name}.json").read_text())
    return found


def told(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((LAUNCH / name).read_text())
    return found


def test_the_job_of_kubernetes_fits_its_schema_and_tells_exit_codes_apart() -> None:
    job = told("kubernetes.yaml")
    jsonschema.validate(job, schema("kubernetes"))
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_action = {(rule["action"], *rule.get("onExitCodes", {}).get("values", [])) for rule in rules}
    assert by_action == {("Ignore",), ("Ignore", 75), ("FailJob", 1, 2, 3, 4, 5, 6, 130)}
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


def test_the_task_of_skypilot_fits_its_schemas() -> None:
    task, known = told("skypilot.yaml"), schema("skypilot")
    jsonschema.validate(task, known["task"])
    jsonschema.validate(task["resources"], known["resources"])
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]


def test_the_task_of_dstack_fits_its_schema() -> None:
    task = told("dstack.yml")
    jsonschema.validate(task, schema("dstack"))
    assert task["spot_policy"] == "spot"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kubernetes", {"spec": {"backofLimit": 3}}),
        ("skypilot", {"task": {"workdirs": "."}}),
        ("dstack", {"resources": {"gpus": 1}}),
    ],
)
def test_the_schemas_notice_a_misspelt_key(name: str, change: dict[str, Any]) -> None:
    files = {"kubernetes": "kubernetes.yaml", "skypilot": "skypilot.yaml", "dstack": "dstack.yml"}
    document, known = told(files[name]), schema(name)
    if name == "skypilot":
        document, known = {**document, "workdirs": "."}, known["task"]
    else:
        ((section, wrong),) = change.items()
        document[section] = {**document[section], **wrong}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, known)


@pytest.mark.parametrize("name", ["modal_app.py", "runpod_pod.py"])
def test_calls_of_a_tool_have_arguments_that_it_knows(name: str) -> None:
    known: dict[str, list[str]] = schema("signatures")["signatures"]
    tree = ast.parse((LAUNCH / name).read_text())
    called = {ast.unparse(call.func): call for call in ast.walk(tree) if isinstance(call, ast.Call)}
    ours = {function: call for function, call in called.items() if function in known}
    assert {function.partition(".")[0] for function in ours} <= {"modal", "app", "runpod"}
    assert len(ours) >= {"modal_app.py": 6, "runpod_pod.py": 1}[name]
    for function, call in ours.items():
        assert {word.arg for word in call.keywords} <= set(known[function]), function
        assert len(call.args) <= len(known[function])


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


def launched(folder: Path, words: list[str], **environment: str) -> tuple[int, list[str]]:
    """Exit status of a launcher whose tools are stand-ins in ``folder``, and what they were called with."""
    path = f"{folder}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(folder), "LOG": str(folder / "log"), **environment}
    done = subprocess.run(words, env=env, cwd=folder, check=False, capture_output=True, text=True, timeout=60)
    log = folder / "log"
    return done.returncode, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(("statuses", "expected", "machines"), [
    ([0], 0, 1), ([75, 0], 0, 2), ([255, 75, 0], 0, 3), ([2, 0], 2, 1), ([75, 75, 75], 75, 3),
])  # fmt: skip
def test_ssh_goes_on_with_the_next_machine(statuses: list[int], expected: int, machines: int, tmp_path: Path) -> None:
    (tmp_path / "statuses").write_text("\n".join(map(str, statuses)) + "\n")
    take = 'status=$(head -1 statuses); sed -i 1d statuses; exit "$status"'
    script(tmp_path / "ssh", f'echo "ssh $*" >> $LOG; case "$2" in mkdir) exit 0;; esac; {take}\n')
    script(tmp_path / "scp", 'echo "scp $*" >> $LOG\n')
    (tmp_path / "my.yaml").write_text("version: 1\n")
    (tmp_path / "f.whl").write_text("")
    words = ["bash", str(LAUNCH / "ssh.sh"), "my.yaml", "one", "two", "three"]
    status, log = launched(tmp_path, words, MIRROR="s3://b/r", FTCLI_SOURCE="f.whl")
    trained = [line for line in log if "run.sh train" in line]
    assert status == expected
    assert [line.split()[1] for line in trained] == ["one", "two", "three"][:machines]
    assert all("MIRROR='s3://b/r' FTCLI_SOURCE='f.whl' bash run.sh train 'my.yaml'" in line for line in trained)
    assert any(re.match(r"scp -q my.yaml \S+/run.sh f.whl one:ftcli/$", line) for line in log)


def test_the_machine_trains_with_its_mirror(tmp_path: Path) -> None:
    script(tmp_path / "ftcli", 'echo "ftcli $*" >> $LOG; exit 75\n')
    words = ["bash", str(LAUNCH / "run.sh"), "train", "my.yaml", "--max-steps", "3"]
    status, log = launched(tmp_path, words, MIRROR="s3://b/r")
    assert (status, log) == (75, ["ftcli train my.yaml --set run.mirror=s3://b/r --max-steps 3"])


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (0, False), (4, False)])
def test_slurm_puts_itself_into_the_queue_again_after_75_alone(status: int, requeued: bool, tmp_path: Path) -> None:
    script(tmp_path / "ftcli", f"echo ftcli >> $LOG; exit {status}\n")
    script(tmp_path / "scontrol", 'echo "scontrol $*" >> $LOG\n')
    ended, log = launched(tmp_path, ["bash", str(LAUNCH / "slurm.sh"), "my.yaml"], SLURM_JOB_ID="17")
    assert ended == (0 if requeued else status)
    assert ("scontrol requeue 17" in log) is requeued


def test_slurm_hands_the_signal_on_and_waits_for_the_checkpoint(tmp_path: Path) -> None:
    script(
        tmp_path / "ftcli",
        "trap 'sleep 0.3; echo saved >> $LOG; exit 75' TERM; sleep 0.5; kill -TERM $PPID\n"
        "while :; do sleep 0.05; done\n",
    )
    script(tmp_path / "scontrol", 'echo "scontrol $*" >> $LOG\n')
    _, log = launched(tmp_path, ["bash", str(LAUNCH / "slurm.sh"), "my.yaml"], SLURM_JOB_ID="17")
    assert log == ["saved", "scontrol requeue 17"]


def test_the_pod_of_runpod_trains_again_after_75_and_stops_itself(tmp_path: Path) -> None:
    """The shell line that the launcher makes, run here."""
    source = (LAUNCH / "runpod_pod.py").read_text().replace("import runpod\n", "")
    scope: dict[str, Any] = {"__name__": "launcher"}
    exec(compile(source, "runpod_pod.py", "exec"), scope)
    recipe = tmp_path / "my recipe.yaml"
    recipe.write_text("version: 1\n# it's mine\n")
    (tmp_path / "pod").mkdir()
    script(tmp_path / "pod" / "ftcli", 'echo "ftcli $*" >> $LOG; [ -f done ] && exit 0; touch done; exit 75\n')
    script(tmp_path / "pod" / "runpodctl", 'echo "runpodctl $*" >> $LOG\n')
    line = scope["line_of"](recipe, "s3://b/r")
    status, log = launched(tmp_path / "pod", ["sh", "-c", line], RUNPOD_POD_ID="p1")
    train = "ftcli train my recipe.yaml --set run.mirror=s3://b/r"
    assert (status, log) == (0, [train, train, "runpodctl stop pod p1"])
    assert (tmp_path / "pod" / "my recipe.yaml").read_bytes() == recipe.read_bytes()
