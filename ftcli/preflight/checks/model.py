"""Rules that need the model's config.json: lengths, adapters, heads, tokenizer, stored weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from ftcli.config.model import LoraConfig
from ftcli.errors import Finding
from ftcli.facts import adapters
from ftcli.facts.llama_cpp import WITHOUT_CONVERTER, converter
from ftcli.facts.model import ModelFacts, has_classifier, takes_sdpa
from ftcli.facts.shape import ModelShape
from ftcli.facts.tokenizer import TokenizerFacts, no_stop_finding
from ftcli.plan.quantization import stored_method, trains_rounded
from ftcli.plan.released import released_form
from ftcli.plan.trained import HEAD, TABLES, why_no_router_loss
from ftcli.preflight.checks.context import Context, Findings, NotMade
from ftcli.tables import exports, images, quantizations
from ftcli.tables.gguf import (
    INSTEAD,
    NORMS_OF_LAYERS,
    TYPES,
    architecture_of,
    unknown_architecture,
)

#: What classifiers of transformers and PEFT call the score.
_SCORE = ("score", "classifier")


def check(context: Context, facts: ModelFacts) -> Findings:
    """FT250, FT259, FT271, FT301, FT302, FT310 to FT327, FT336, FT339, FT340, FT351, FT355, FT447, FT740, FT747
    and FT756.
    """
    if facts.senses is not None and context.work == "train":
        sees = context.method.sees and facts.raw.get("model_type") in images.TABLE
        on = "text and images" if sees else "text"
        parts = context.recipe.model.train
        message = f"only the language model of {facts.name} is trained, on {on}; {facts.senses}: kept, not trained"
        if parts != images.LANGUAGE:
            message = f"{', '.join(parts)} of {facts.name}: trained, on {on}; all else of {facts.senses}: kept"
        yield context.note("FT310", "model.name_or_path", message)
    yield from _parts(context, facts)
    if context.recipe.data.image_max_pixels is not None:
        yield from _most_pixels(context, facts)
    if context.work == "train":
        yield from _router_loss(context, facts)
    if context.recipe.model.attention == "sdpa" and context.work != "export" and not takes_sdpa(facts.text_type):
        message = f"model.attention: sdpa is not available for {facts.text_type} in transformers"
        yield context.error("FT250", "model.attention", message, help="use model.attention: auto, or eager")
    if context.method.classifier:
        yield from _classifier(context, facts)
    if facts.is_local and context.recipe.model.revision is not None:
        yield without_revision(context, "model.revision", facts)
    yield from _positions(context, facts)
    yield from _stored_quantized(context, facts)
    yield from _rescaled(context, facts)
    yield from _random_base(context, facts)
    yield from _llama_cpp(context, facts)
    yield from _stacks(context, facts)
    if facts.shape is not None:
        if facts.shape.head_dim % 2:
            message = f"head_dim {facts.shape.head_dim} is odd; rotary embeddings need an even one"
            yield context.error("FT319", "model.name_or_path", message, help="correct head_dim in config.json")
        yield from _adapters(context, facts, facts.shape)
    yield from _tokens(context, facts)
    yield from _new_tokens(context, facts)
    yield from _weights(context, facts)


def without_revision(context: Context, key: str, facts: ModelFacts) -> Finding:
    """FT259: a folder has no revisions."""
    message = f"{key} has no effect: {facts.name} is a folder, taken as it is"
    return context.warning("FT259", key, message, help="remove it, or name the model as OWNER/NAME")


def _parts(context: Context, facts: ModelFacts) -> Findings:
    """FT447 for parts in ``model.train`` that the model has not, or that the run cannot train or write."""
    recipe, key = context.recipe, "model.train"
    if recipe.model.train == images.LANGUAGE or context.work == "eval":
        return
    asked = ", ".join(part for part in recipe.model.train if part != "language")
    help = "leave model.train out: the language model is trained"
    if facts.raw.get("model_type") not in images.TABLE:
        yield context.error("FT447", key, f"{facts.name} is no model that ftcli trains on images: no {asked}", help)
    elif context.work == "train" and not context.method.sees:
        yield context.error("FT447", key, f"{context.method.title} trains on text alone, which no {asked} reads", help)
    elif quantizations.row(recipe.quantization.method).training is not None:
        said = f"quantization.method: {recipe.quantization.method} trains the language model, and not its {asked}"
        yield context.error("FT447", key, said, help)
    for index, name in enumerate(recipe.export.formats):
        if name in ("gguf", "ollama"):
            message = f"export.formats: {name} holds the language model alone, without what is learned by {asked}"
            help = "use export.formats: [safetensors]"
            yield context.before_export("FT447", f"export.formats.{index}", message, help)


def _most_pixels(context: Context, facts: ModelFacts) -> Findings:
    """FT341 where nothing would read ``data.image_max_pixels``."""
    row = images.TABLE.get(str(facts.raw.get("model_type")))
    if row is None or row.most_pixels is None:
        message = f"data.image_max_pixels says nothing of {facts.name}, "
        message += (
            "which is trained on text alone" if row is None else "whose images have a number of tokens of its own"
        )
        yield context.error("FT341", "data.image_max_pixels", message, help="remove it")


def _router_loss(context: Context, facts: ModelFacts) -> Findings:
    """FT318 where config.json asks for the routers' auxiliary loss, FT355 where the recipe does, and there is none."""
    stated, reason = context.recipe.train.router_aux_loss_coef, why_no_router_loss(context.recipe, facts)
    if context.from_prompts:
        reason = "it is of supervised fine-tuning"
    if reason is None:
        return
    if stated:
        key = "train.router_aux_loss_coef"
        yield context.error("FT355", key, f"{key}: no auxiliary loss of routers is added: {reason}", help="remove it")
    elif stated is None and facts.language.get("output_router_logits"):
        message = f"{facts.name} has output_router_logits: true; the routers' auxiliary loss is not added: {reason}"
        help = "adapters need no action (the router is frozen); in full fine-tuning watch the held-out loss"
        yield context.warning("FT318", "model.name_or_path", message, help=help)


def _classifier(context: Context, facts: ModelFacts) -> Findings:
    """FT351 for families without a sequence classifier and for questions to a reward model, FT339 for formats that
    cannot hold one.
    """
    if facts.senses is not None or not has_classifier(facts.text_type):
        message = f"transformers has no sequence classifier of {facts.text_type}, as which a reward model is saved"
        help = "choose another base model for train.method: reward"
        yield context.error("FT351", "model.name_or_path", message, help=help)
    if context.command in ("chat", "sample"):
        help = "`ftcli eval` measures it; the base model answers under a recipe without train.method: reward"
        yield context.error("FT351", "train.method", "a reward model scores answers and writes none", help=help)
    able = [name for name, row in exports.TABLE.items() if row.scores]
    for index, name in enumerate(context.recipe.export.formats):
        if name not in able:
            path, message = f"export.formats.{index}", f"{name} has no place for a reward model"
            yield context.before_export("FT339", path, message, help=f"use export.formats: [{', '.join(able)}]")


def _rescaled(context: Context, facts: ModelFacts) -> Findings:
    """RWKV divides weights of its later layers before it evaluates, and multiplies them again before it trains."""
    method = context.recipe.quantization.method
    if facts.text_type == "rwkv" and quantizations.row(method).quantize and facts.language.get("rescale_every", 6):
        message = f"{facts.name} rescales its weights by itself, and quantization.method: {method} stores them packed"
        yield context.error("FT336", "quantization.method", message, help="remove the section quantization")


def _stored_quantized(context: Context, facts: ModelFacts) -> Findings:
    """Packed weights are read by the method that stores them so; anything else is refused."""
    method = context.recipe.quantization.method
    merges = context.work != "eval" and any(exports.row(name).merges for name in context.recipe.export.formats)
    if context.recipe.lora is not None and quantizations.row(method).training is not None and merges:
        # The sum of rounded weights and an adapter is not what either of them would be rounded to.
        message = f"an adapter cannot be merged into {method} weights: rounding the sum to {method} again would change "
        help = f"use export.formats: [{', '.join(exports.names(merges=False))}], or train without `lora`"
        yield context.before_export("FT339", "export.formats", f"{message}the model", help=help)
    else:
        yield from _formats_of_rounded(context, method)
    yield from _ternary_types(context, method)
    if facts.quantization is None:
        return
    path, stored = "model.name_or_path", stored_method(facts.raw)
    released = released_form(facts.raw)
    if released is not None:
        yield from _released(context, facts, released[1])
    elif stored is None:
        message = (
            f"{facts.name} is stored quantized ({facts.quantization}), which this version of ftcli cannot train on"
        )
        help = "name the model in bfloat16"
        yield context.error("FT316", path, message, help=help)
    elif context.recipe.quantization.method != stored and context.recipe.model.init == "pretrained":
        help = f"set quantization.method: {stored}, or name it in bfloat16"
        yield context.error("FT316", path, f"{facts.name} is stored in {stored}", help=help)
    elif quantizations.row(stored).training is not None:
        # Masters are written as they are, and what adapters are merged into is said above.
        yield from _warm_up(context, facts)
    elif merges:
        message = f"{facts.name} is stored in {stored}, and merging needs the base model in full precision"
        help = f"use export.formats: [{', '.join(exports.names(merges=False))}]"
        yield context.before_export("FT316", path, message, help=help)


def _released(context: Context, facts: ModelFacts, words: str) -> Findings:
    """FT327: what weights are trained as that are stored in a form of their own, and read into any."""
    if context.work != "train" or context.recipe.model.init != "pretrained":
        return
    method = context.recipe.quantization.method
    if quantizations.row(method).quantize is None:
        said, help = (
            "trained in model.dtype, exactly as they are",
            "quantization.method: nf4 takes a quarter of that memory",
        )
    else:
        said, help = f"read exactly, then rounded once more, to {method}", None
    message = f"{facts.name} is stored in {words}: its weights are {said}"
    yield context.note("FT327", "model.name_or_path", message, help)


def _warm_up(context: Context, facts: ModelFacts) -> Findings:
    """FT340: a model that was trained rounded is not the model of its exact values, if it has any."""
    recipe = context.recipe
    if context.trains and recipe.quantization.lambda_warmup_steps and recipe.model.init == "pretrained":
        message = (
            f"{facts.name} was trained with ternary weights; lambda_warmup_steps would start from full-precision "
            "values that it was never trained on"
        )
        help = "remove it; training goes on from the ternary weights"
        yield context.error("FT340", "quantization.lambda_warmup_steps", message, help=help)


def _formats_of_rounded(context: Context, method: str) -> Findings:
    """FT339: formats that would hold masters as plain weights, and those that need ternary weights and get none."""
    if context.work == "eval":
        return
    rounds = quantizations.row(method).training is not None
    for index, name in enumerate(context.recipe.export.formats):
        row, path = exports.row(name), f"export.formats.{index}"
        if rounds and not row.masters:
            message = f"{name} would store the float32 masters of {method} weights as ordinary weights"
            help = f"use export.formats: [{', '.join(exports.of_masters())}]"
            yield context.before_export("FT339", path, message, help=help)
        elif row.of_quantized and method not in row.of_quantized:
            wanted = " or ".join(row.of_quantized)
            message = f"{name} packs weights of quantization.method: {wanted}, and this recipe has {method}"
            yield context.before_export("FT339", path, message, help="leave it out")


def _ternary_types(context: Context, method: str) -> Findings:
    """FT339: types of GGUF that hold three values, for weights that have more."""
    types = [name for name in context.recipe.export.gguf.types if TYPES[name].ternary]
    asked = any(exports.row(name).llama_cpp for name in context.recipe.export.formats)
    if context.work == "eval" or not asked or not types or quantizations.row(method).training is not None:
        return
    able = " | ".join(quantizations.trained())
    message = f"{types[0]} holds ternary weights (quantization.method: {able}), and this recipe has {method}"
    yield context.before_export("FT339", "export.gguf.types", message, help="use q8_0, or one of the other types")


def _random_base(context: Context, facts: ModelFacts) -> Findings:
    """Yields now what `export` would refuse after training. Benchmarks are not exported."""
    recipe = context.recipe
    merged = [name for name in recipe.export.formats if exports.row(name).merges]
    if context.trains and recipe.model.init == "random" and recipe.lora is not None and merged:
        message = f"{facts.name} has random weights, which are not saved, so `ftcli export` cannot merge the adapter"
        help = f"use export.formats: [{', '.join(exports.names(merges=False))}]"
        yield context.note("FT747", "model.init", message, help=help)


def _llama_cpp(context: Context, facts: ModelFacts) -> Findings:
    """Yields what `export` would refuse of a family that llama.cpp does not build, or ftcli does not know how."""
    asked = [name for name in context.recipe.export.formats if exports.row(name).llama_cpp]
    if context.work not in ("train", "export") or not asked:
        return
    reason = None
    if architecture_of(facts.text_type) is None:
        reason = unknown_architecture(facts.text_type)
        if "gguf" in asked and converter(context.recipe.export.gguf.converter) is None:
            message = f"gguf: {reason}, and llama.cpp's own converter is not here"
            yield context.before_export("FT758", "export.formats", message, help=WITHOUT_CONVERTER)
        asked = [name for name in asked if name != "gguf"]
        reason = reason if asked else None
    elif context.recipe.quantization.use_rms_norm and context.recipe.lora is None:
        reason = NORMS_OF_LAYERS
    if reason is not None:
        yield context.before_export("FT756", "export.formats", f"{asked[0]}: {reason}", help=INSTEAD)


def _stacks(context: Context, facts: ModelFacts) -> Findings:
    """Yields now what `export` would refuse of experts after training."""
    asked = [name for name in context.recipe.export.formats if exports.row(name).linear_only]
    if context.trains and asked and facts.shape is not None and facts.shape.has_experts:
        message = f"{asked[0]} rounds linear layers alone, and the experts of {facts.name} are stacks"
        help = f"leave {asked[0]} out; export.formats: [safetensors] writes the model in 16 bits"
        yield context.note("FT740", "export.formats", message, help=help)


def not_made(context: Context, facts: ModelFacts) -> Iterator[NotMade]:
    """Checks that could not be made because files are not on this machine, or because config.json does not say."""
    name = facts.name
    if facts.max_positions is None:
        yield NotMade("sequence length against positions", f"{name}'s config.json states no positions")
    if facts.tokenizer is None:
        reason = f"the tokenizer of {context.recipe.model.tokenizer or name} was not read"
        yield NotMade("vocabulary against the tokenizer", reason)
        yield NotMade("pad and stop tokens", reason)
        if context.recipe.data.chat_template is None:
            yield NotMade("chat template", reason)
    elif facts.tokenizer.size is None:
        yield NotMade("vocabulary against the tokenizer", f"{facts.tokenizer.folder} has no tokenizer.json")
    if facts.weights is None and context.recipe.model.init == "pretrained":
        yield NotMade("weights", f"preflight reads no weights, so it did not try whether {name} can be downloaded")


def _positions(context: Context, facts: ModelFacts) -> Findings:
    asked, limit = context.recipe.data.max_seq_len, facts.max_positions
    path, scaling = "data.max_seq_len", facts.rope_scaling
    if limit is not None and asked > limit:
        if context.benches:
            said = f"{asked} tokens exceed what {facts.name} can attend to ({limit}): timed all the same"
            help = f"training takes at most {limit}; a model reaches further with rope scaling in its config.json"
            yield context.warning("FT301", path, f"{said}, on random weights", help=help)
        else:
            message = f"data.max_seq_len {asked} exceeds what {facts.name} can attend to ({limit})"
            yield context.error("FT301", path, message, help=f"use at most {limit}")
        return
    if scaling is not None and scaling.original is not None and asked > scaling.original:
        kind = f"{scaling.kind}, factor {scaling.factor:g}" if scaling.factor else scaling.kind
        yield context.note("FT302", path, f"positions beyond {scaling.original} rely on rope scaling ({kind})")
    if facts.sliding_window is not None and asked > facts.sliding_window:
        message = f"layers with a sliding window attend to the last {facts.sliding_window} of up to {asked} tokens"
        yield context.note("FT302", path, message)


def _start(context: Context, lora: LoraConfig) -> Findings:
    """FT334 for an adapter to go on from that does not fit the settings, FT250 where none can be gone on from."""
    path = "lora.start_from"
    if lora.start_from is None or context.work != "train":
        return
    if not context.method.goes_on:
        message = f"{context.method.title} compares with the model without adapters, so it cannot go on from one"
        help = "merge it (`ftcli export --format safetensors`) and name the merged model in model.name_or_path"
        yield context.error("FT250", path, message, help)
    elif lora.init_lora_weights is not True:
        message = f"{path} and lora.init_lora_weights: {lora.init_lora_weights} both say where adapters begin"
        yield context.error("FT250", path, message, "remove one of them")
    for problem in adapters.start_problems(lora, lora.start_from):
        help = "write the adapter's own values, or name another folder"
        yield context.error("FT334", path, f"the adapter in {adapters.start_folder(lora.start_from)}: {problem}", help)


def _adapters(context: Context, facts: ModelFacts, shape: ModelShape) -> Findings:
    lora = context.recipe.lora
    if lora is None:
        return
    if not isinstance(lora.target_modules, str):
        for index, target in enumerate(lora.target_modules):
            yield from _target(context, facts, shape, f"lora.target_modules.{index}", target)
        if not lora.target_modules:
            yield context.error("FT311", "lora.target_modules", "lora.target_modules is empty", help="use all-linear")
    yield from _start(context, lora)
    of_others = context.recipe.model.train != images.LANGUAGE  # whose names are looked up when the model is there
    for problem in () if of_others else adapters.problems(adapters.targets_of(shape, lora), lora):
        yield adapters.problem_finding(problem, context.origins.at(f"lora.{problem.key}"))
    for index, name in enumerate(lora.modules_to_save):
        yield from _saved_module(context, facts, shape, f"lora.modules_to_save.{index}", name)


def _target(context: Context, facts: ModelFacts, shape: ModelShape, path: str, target: str) -> Findings:
    if target in TABLES:
        yield adapters.head_finding(target, context.origins.at(path))
    elif not shape.adapted((target,)) and context.recipe.model.train == images.LANGUAGE:
        leaves = [linear.leaf for linear in shape.linears]
        close = get_close_matches(target, leaves, 1)
        listed = f"{facts.model_type} has: {', '.join(leaves)}"
        help = f"did you mean {close[0]}? {listed}" if close else listed
        yield context.error("FT311", path, f"lora.target_modules: {facts.name} has no linear layer {target}", help=help)


def _saved_module(context: Context, facts: ModelFacts, shape: ModelShape, path: str, name: str) -> Findings:
    method = context.recipe.quantization.method
    if context.method.classifier and name in (HEAD, *_SCORE):
        what = "a reward model does not use lm_head" if name == HEAD else f"{name} is always trained whole"
        yield context.error("FT313", path, f"lora.modules_to_save: {what}", help="remove it")
    elif name in TABLES and shape.tied:
        yield adapters.half_of_a_pair_finding(name, context.origins.at(path))
    elif name not in (*TABLES, "norm", *(linear.leaf for linear in shape.linears)):
        yield adapters.no_module_finding(name, TABLES, context.origins.at(path))
    elif quantizations.row(method).freezes_base and name in (linear.leaf for linear in shape.linears):
        message = f"lora.modules_to_save: {name} is stored in {method}, which cannot be trained"
        help = f"name it in lora.target_modules, or keep to {', '.join(TABLES)}, norm"
        yield context.error("FT271", path, message, help=help)


def _tokens(context: Context, facts: ModelFacts) -> Findings:
    if facts.tokenizer is not None:
        path = "model.tokenizer" if context.recipe.model.tokenizer else "model.name_or_path"
        yield from _tokenizer(context, facts, facts.tokenizer, path)
    if facts.vocab_size is not None:
        size, pad = facts.vocab_size, facts.pad_token_id
        beyond = [token for token in facts.eos_token_ids if token >= size]
        if pad is not None and not -size <= pad < size:  # -1 is the last row of torch's embedding
            beyond.append(pad)
        for token in beyond:
            message = f"config.json names token id {token}, and the vocabulary has {size}"
            help = "correct eos_token_id and pad_token_id in config.json"
            yield context.error("FT325", "model.name_or_path", message, help=help)


def _new_tokens(context: Context, facts: ModelFacts) -> Findings:
    """FT352: a table that has no room for the tokens, or what trains no single rows."""
    recipe, path = context.recipe, "model.add_tokens"
    tokens = recipe.model.add_tokens
    if not tokens:
        return
    twice = next((token for token in tokens if tokens.count(token) > 1), None)
    if twice is not None:
        yield context.error("FT352", path, f"{path} names {twice!r} twice", help="name it once")
    size = None if facts.tokenizer is None else facts.tokenizer.size
    text = facts.raw.get("text_config", facts.raw)
    table = text.get("vocab_size_per_layer_input") if isinstance(text, Mapping) else None
    if isinstance(table, int) and size is not None and size + len(tokens) > table:
        message = (
            f"{path}: {len(tokens)} tokens, and the table of {facts.name}'s layers has {table - size} rows for them"
        )
        yield context.error("FT352", path, message, help="use tokens that the model keeps in reserve, <unused0> and on")
    against = _why_no_rows(context)
    if against is not None:
        yield context.error("FT352", path, f"{path} does not go with {against}", help="remove one of the two")


def _why_no_rows(context: Context) -> str | None:
    recipe, lora = context.recipe, context.recipe.lora
    if context.work == "train" and not (context.method.name == "sft" and context.command != "grpo"):
        return f"{context.method.title}: the loss of supervised fine-tuning alone trains single rows"
    if recipe.launch.is_sharded or recipe.launch.context_parallel_size > 1:
        return "launch.engine: fsdp and launch.context_parallel_size"
    if trains_rounded(recipe):
        return f"quantization.method: {recipe.quantization.method}"
    if lora is not None and lora.changes_base:
        return f"lora.init_lora_weights: {lora.init_lora_weights}"
    if lora is not None and any(name in TABLES for name in lora.modules_to_save):
        return "lora.modules_to_save of embedding or head, which trains all rows"
    return None


def _tokenizer(context: Context, facts: ModelFacts, tokenizer: TokenizerFacts, path: str) -> Findings:
    if tokenizer.size is not None and facts.vocab_size is not None and tokenizer.size > facts.vocab_size:
        yield context.error(
            "FT315",
            path,
            f"the tokenizer has ids up to {tokenizer.size - 1}, and the vocabulary of {facts.name} has "
            f"{facts.vocab_size}",
            help="use the tokenizer that belongs to the model; a special token that its settings name and that it does "
            "not have gets an id of its own",
        )
    if tokenizer.eos_token is None:
        yield no_stop_finding(f"in {tokenizer.folder}", context.origins.at(path))
    elif tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        message = f"rows are padded with the stop token {tokenizer.eos_token}, which is harmless: padding is masked"
        yield context.note("FT324", path, message)


def _weights(context: Context, facts: ModelFacts) -> Findings:
    weights, message = facts.weights, None
    help = "copy model*.safetensors into it, or build random weights with `model.init: random`"
    if weights is None or context.recipe.model.init == "random" or context.benches:
        return
    if weights.missing:
        named = ", ".join(weights.missing[:3])
        message = f"{facts.folder} lacks {len(weights.missing)} of its weight files: {named}"
    elif weights.unreadable:
        message = f"in {facts.folder} {', '.join(weights.unreadable[:3])}"
        help = "make it readable, as with `chmod u+r`, or copy it anew"
    elif weights.pickle_only:
        message = f"{facts.folder} holds its weights in pickle files only, which can run code when loaded"
    elif weights.gguf is not None:
        if not quantizations.row(context.recipe.quantization.method).reads_gguf:
            able = " or ".join(name for name in quantizations.names() if quantizations.row(name).reads_gguf)
            message = (
                f"{weights.gguf} is read with quantization.method: {able} alone, where the file holds all there is"
            )
    elif not weights.files:
        message = f"{facts.folder} holds no weights"
    if message is not None:
        yield context.error("FT317", "model.name_or_path", message, help=help)
