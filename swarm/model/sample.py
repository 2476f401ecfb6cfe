"""Text from a trained model folder: `python -m swarm.model.sample DIR --prompt TEXT`.

Uses nothing of this package but the words for errors: a folder that loads here loads with Transformers anywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from swarm.errors import NotFound
from swarm.process.lifecycle import program, run_cli


def sample(folder: Path, prompt: str, *, tokens: int, seed: int) -> str:
    """`prompt` and up to `tokens` tokens that the model in `folder` continues it with, drawn with `seed`.

    An empty prompt begins after an end of text. NotFound if the folder holds no model.
    """
    if not (folder / "config.json").is_file():
        raise NotFound(f"{folder} holds no model", hint="fetch one with: swarm pull JOB DIR")
    disable_progress_bar()  # type: ignore[no-untyped-call]  # the library has no annotation here
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ids = tokenizer(prompt, return_tensors="pt").input_ids if prompt else torch.tensor([[tokenizer.eos_token_id]])
    torch.manual_seed(seed)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=40,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def _command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to draw.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal text.")] = 0,
) -> None:
    """Continue a text with a trained model."""
    print(sample(folder, prompt, tokens=tokens, seed=seed))


def main() -> None:
    app = program()
    app.command()(_command)
    run_cli(app, "python -m swarm.model.sample", variables=False)


if __name__ == "__main__":
    main()
