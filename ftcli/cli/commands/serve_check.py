"""`ftcli serve-check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options
from ftcli.cli.environment import secret
from ftcli.cli.render import table
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.serving import ServeCheck


def serve_text(result: ServeCheck) -> str:
    """A line for each way of asking, answers that differ, and the verdict."""
    ways = {"conversations": result.chat, "given tokens": result.tokens}
    rows = [
        {
            "asked with": name,
            "answers": way.asked,
            "same": way.same,
            "equally likely": way.near_ties,
            "other": way.asked - way.same - way.near_ties,
            "log-probabilities differ by": way.log_prob_difference,
        }
        for name, way in ways.items()
        if way is not None
    ]
    lines = table(rows)
    for one in result.different:
        lines += [f"{one.asked}: {one.prompt!r}", f"  trained: {one.trained!r}", f"  served:  {one.served!r}"]
    lines += [f"not compared: {each}" for each in result.not_made]
    verdict = "serves the model as it was trained" if not result.faults else "answers otherwise"
    return "\n".join([*lines, f"{result.url} {verdict} ({result.model}, {result.prompts} prompts)"])


@options.command("serve-check", serve_text, exit_code=lambda result: result.exit_code)
def serve_check(
    session: Session,
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run directory, or the recipe that names it.",
            show_default=False,
            autocompletion=names.runs_and_recipes,
        ),
    ],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="The server, as in http://localhost:8000.", show_default=False)
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The server's name for the model, if it has several.")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", min=1, help="Ask so many rows.")] = 8,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", metavar="N", min=1, help="Longest answer in tokens (eval.generate.max_new_tokens)."
        ),
    ] = None,
    checkpoint: options.CheckpointOption = None,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance", metavar="NATS", min=0.0, max=100.0,
            help="Two tokens whose log-probabilities are nearer than this are equally likely.",
        ),
    ] = 0.25,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", metavar="NAME", help="The environment variable that holds the server's key."),
    ] = None,
    set_: options.SetOption = None,
) -> ServeCheck:  # fmt: skip
    """Compare a running server with the run that it serves.

    Asks any OpenAI-compatible server (vLLM, SGLang, llama-server, Ollama) for greedy answers to the run's held-out
    prompts, and answers them with the trained model. A wrong chat template, a missing or doubled first token, stop
    tokens that are not obeyed, an adapter that is not loaded and other numerics are told apart; any of them exits with
    status 1. No other network is used.

    \b
    Examples:
      ftcli serve-check runs/mine --url http://localhost:8000
      ftcli serve-check runs/mine --url http://localhost:8000/v1 --model mine --prompts 20 --json
      ftcli serve-check runs/mine --url https://gpu-box:8443 --api-key-env VLLM_API_KEY
    """

    from ftcli.run.signals import stoppable

    key = None if api_key_env is None else secret(api_key_env, "--api-key-env")
    loaded, run_dir = options.load_run(target, options.overrides(set_))
    with stoppable("comparing"):
        from ftcli.pipeline.serving import ServeOptions, check_server

        chosen = ServeOptions(url, model, prompts, max_new_tokens, checkpoint, tolerance, key)
        return check_server(loaded, session, run_dir, chosen)
