"""Refuses by name what a recipe can say but no code carries out: nothing is accepted and then ignored."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from ftcli.config.model import SUPPORTED_ATTENTION
from ftcli.facts.llama_cpp import LLAMA_QUANTIZE, WITHOUT_QUANTIZER, quantizer
from ftcli.preflight.checks.context import Context, Findings, as_in_recipe
from ftcli.rows.remote import missing_package
from ftcli.tables import engines, exports, loggers, methods, quantizations, stores
from ftcli.tables.gguf import TYPES

Installed = Callable[[str], bool]


def is_installed(package: str) -> bool:
    """True if a top-level package can be imported; does not import it. A folder without any code is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def check(context: Context, installed: Installed = is_installed) -> Findings:
    """Yields FT250 for what is not supported, FT252 for a repository's code, FT253 for packages that are missing, FT758
    for programs.
    """
    yield from _values(context)
    yield from _exports(context, installed)
    yield from _programs(context)
    yield from _code(context)
    yield from _loggers(context, installed)
    yield from _mirror(context)


def _mirror(context: Context) -> Findings:
    """FT250 for storage that a run cannot be copied to, FT253 for the package that it needs."""
    url, path = context.recipe.run.mirror, "run.mirror"
    if url is None or not context.trains:
        return
    known = stores.names(mirrors=True)
    row = stores.of(url)
    install = missing_package(url)
    if row is None or not row.mirrors:
        yield context.error(
            "FT250", path, f"{path} {url} is no storage that runs are copied to", f"use {', '.join(known)}"
        )
    elif install is not None:
        yield context.error("FT253", path, f"{url} needs a package that writes to {row.title}", install)


def _values(context: Context) -> Findings:
    recipe = context.recipe
    quantization = quantizations.row(recipe.quantization.method)
    launch, most = recipe.launch, engines.row(recipe.launch.engine).processes
    if most is not None and launch.num_processes > most:
        message = f"launch.num_processes: {launch.num_processes} is not supported with launch.engine: {launch.engine}"
        help = f"use {most}, or launch.engine: {' or '.join(engines.of_several())}"
        yield context.error("FT250", "launch.num_processes", message, help)
    attention = recipe.model.attention
    if attention not in SUPPORTED_ATTENTION:
        message = f"model.attention: {attention} is not supported"
        yield context.error("FT250", "model.attention", message, f"use {', '.join(SUPPORTED_ATTENTION)}")
    if context.work == "train":
        yield from _method(context)
    if quantization.freezes_base and recipe.lora is None:
        others = " | ".join(quantizations.names(freezes_base=False))
        message = (
            f"quantization.method {recipe.quantization.method} freezes the base weights, so there is nothing to train"
        )
        help = f"add a `lora` section, or use `quantization.method: {others}` for full fine-tuning"
        yield context.error("FT251", "quantization.method", message, help=help)


def _method(context: Context) -> Findings:
    """Yields settings that the training method does not support, and sections of other methods of its command."""
    recipe, method = context.recipe, context.method
    for section in methods.sections():
        readers = [m.name for m in methods.TABLE.values() if m.section == section and m.command == method.command]
        if readers and method.name not in readers and getattr(recipe, section) is not None:
            message = f"the section {section} is not read under train.method: {method.name}"
            help = f"write train.method: {' | '.join(readers)}, or remove the section"
            yield context.error("FT250", section, message, help=help)
    for path, usable in method.supports.items():
        value = recipe.value_of(path)
        if value not in usable:
            help = "remove it" if usable == (None,) else f"use {', '.join(as_in_recipe(v) for v in usable)}"
            message = f"{path}: {as_in_recipe(value)} is not supported by {method.title}"
            yield context.error("FT250", path, message, help)


def _exports(context: Context, installed: Installed) -> Findings:
    for index, name in enumerate(context.recipe.export.formats):
        row = exports.row(name)
        if row.package is not None and not installed(row.package.name):
            package = row.package
            yield context.lacks(f"export.formats.{index}", f"export.formats: {name}", package.name, package.install)


def _programs(context: Context) -> Findings:
    """FT758: `export`, which says it of this machine, would end at it, after training."""
    export = context.recipe.export
    types = exports.gguf_types(export.formats, export.gguf.types)
    quants = [kind for kind in types if TYPES[kind].quantized_by is not None]
    if quants and context.command != "export" and quantizer() is None:
        message = f"export.gguf.types: {quants[0]} is made by llama.cpp's {LLAMA_QUANTIZE}, which is not on the PATH"
        yield context.note("FT758", "export.gguf.types", message, help=WITHOUT_QUANTIZER)


def _code(context: Context) -> Findings:
    if context.recipe.model.trust_remote_code:
        help = "remove model.trust_remote_code and use a model that transformers has built in"
        yield context.error("FT252", "model.trust_remote_code", "ftcli runs no code from a model repository", help=help)


def _loggers(context: Context, installed: Installed) -> Findings:
    for name in context.recipe.logging.loggers:
        row = loggers.row(name)
        if not installed(row.package):
            yield context.lacks(f"logging.{name}", f"logging.{name}", row.package, row.install)
