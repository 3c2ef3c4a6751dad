"""`enginecast generate`: text in, text out, with an engine that generates.  It needs no torch."""

from time import perf_counter
from typing import Annotated, Any

import msgspec
import typer

from enginecast.cli.options.from_fields import AsJson, BundleDir, Prompts, RunFlags, grouped
from enginecast.cli.terminal.output import (
    print_json,
    progress,
    results,
    results_apart,
    say,
    standard_output,
)
from enginecast.errors import BundleError, UsageError
from enginecast.printable import printable


@grouped
@results_apart()
def generate(
    bundle: BundleDir,
    how: RunFlags,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Prompt; repeatable.")
    ] = None,
    prompts: Prompts = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Most tokens to generate; default: what fits, up to 256."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", min=0.0, help="Sampling temperature; 0: greedy."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Sample from the N most likely tokens; 0: from all."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            metavar="P", help="Sample from the most likely tokens that add up to probability P."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="X", help="Above 1: make tokens that already occurred less likely."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Sampling seed.")] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Write each prompt by the tokenizer's chat template."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text that follows prompts; needs no torch.

    The text of a single prompt is printed as it is generated.  Without --temperature, --top-k or
    --top-p, the model's generation config decides whether to sample.
    """
    if bool(prompt) == (prompts is not None):
        raise UsageError("give either --prompt TEXT or --prompts FILE.txt")
    from enginecast.runtime.load import load
    from enginecast.runtime.prompts import read_prompts
    from enginecast.runtime.text_generation import Completion

    texts = prompt or read_prompts(prompts)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "chat": chat,
    }
    out = standard_output()
    try:
        loaded = load(bundle, **how.arguments())
    except BundleError as error:  # of a model's folder: only this export makes text
        error.hint = error.hint.replace(" -o DIR`", " --kv-cache -o DIR`")
        raise
    with loaded as engine:
        generator = engine.text_generator
        start = perf_counter()
        found: list[Completion] = []
        if len(texts) == 1 and not as_json:
            for piece in generator.stream(texts[0], **options):
                if isinstance(piece, Completion):
                    found.append(piece)
                else:
                    print(printable(piece), end="", file=out, flush=True)
            print(file=out)
        else:
            found = generator.complete(texts, **options)
        seconds = perf_counter() - start
        backend, outcome = engine.backend, engine.verdict.outcome
    if as_json:
        completions = [
            {"prompt": text, **msgspec.to_builtins(each)}
            for text, each in zip(texts, found, strict=True)
        ]
        content = {"completions": completions, "backend": backend, "verdict": outcome}
        print_json({**content, "seconds": seconds})
        return
    for text, each in zip(texts, found, strict=True) if len(texts) > 1 else ():
        say(results(), f"> {text}\n{each.text}\n")
    tokens = sum(each.new_tokens for each in found)
    cut = sum(each.finish_reason == "length" for each in found)
    reason = f"; {cut} of {len(found)} cut at --max-new-tokens" if cut else ""
    say(progress(), f"{tokens} tokens, {tokens / seconds:.1f}/s ({backend}){reason}")
