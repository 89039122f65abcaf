"""What clipped examples contribute, by vocabulary and length: a norm that is raised by too much throws signal away.

    python -m scripts.bench.contributions --output out/contributions.jsonl
    python -m scripts.bench.contributions --vocabularies 50257 --lengths 512 --hidden 768 --precision bf16

A language model of one Llama layer and random weights, one example of random tokens whose gradient is ten times the clip
norm C: ‖contribution‖/C, taken in float64 of the clipped sum, should be 1, and must never be above. Beside it stands whether
the check before the first step accepts the engine, on that example and one of half its length.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from doppler_hf.privacy import ClippedGradients
from doppler_hf.privacy.clipping import check_per_sample_gradients
from doppler_hf.privacy.losses import token_losses
from doppler_hf.workloads.arguments import one_line_errors, parse_args
from scripts.bench.measure import append_json_line

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}


@dataclass
class ContributionArguments:
    """The models and lengths."""

    vocabularies: str = field(default="1000,50257,128256,151936,256000", metadata={"help": "Comma separated."})
    lengths: str = field(default="16,256,512,1024,4096", metadata={"help": "In tokens, comma separated."})
    hidden: str = field(default="64,768", metadata={"help": "Hidden sizes, comma separated."})
    ties: str = field(default="tied,untied", metadata={"help": "Whether the head is the embedding's table."})
    precision: str = field(default="float32", metadata={"help": "float32, bf16 or autocast.", "choices": list(DTYPES)})
    most_logits: float = field(default=3e8, metadata={"help": "Leave out lengths of which an example has more logits."})
    check: bool = field(default=True, metadata={"help": "Also run the check before the first step."})
    threads: int = field(default=2, metadata={"help": "torch's threads."})
    output: str | None = field(default=None, metadata={"help": "File to which every result is added as a line of JSON."})


def build(*, vocabulary: int, length: int, hidden: int, tied: bool, precision: str) -> nn.Module:
    """Return a language model of one layer."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=1,
        num_attention_heads=hidden // 32, max_position_embeddings=length, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DTYPES[precision]).train()


def losses_of(model: nn.Module, batch: dict[str, Tensor], *, precision: str) -> Tensor:
    """Return the mean loss of each example's tokens, shape (batch,)."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return token_losses(logits, batch["labels"], shift=True)


def contribution(model: nn.Module, batch: dict[str, Tensor], *, precision: str) -> float:
    """Return ‖contribution‖/C of the batch's one example, for a C of a tenth of its norm."""
    with ClippedGradients(model, max_grad_norm=1e-30) as clipped:
        norm = float(clipped.backward(losses_of(model, batch, precision=precision)))
    with ClippedGradients(model, max_grad_norm=norm / 10) as clipped:
        clipped.backward(losses_of(model, batch, precision=precision))
        squares = sum(torch.linalg.vector_norm(total, dtype=torch.float64).square() for total in clipped.sums.values())
    return float(squares) ** 0.5 / (norm / 10)


def check(model: nn.Module, batch: dict[str, Tensor], *, precision: str) -> str:
    """Return "accepted", or why the check before the first step refuses the engine."""
    length = batch["input_ids"].shape[1]
    short = {
        "input_ids": batch["input_ids"][:, : length // 2].roll(1, 1),
        "labels": batch["labels"][:, : length // 2].roll(1, 1),
    }
    together = {
        name: torch.cat([batch[name], nn.functional.pad(short[name], (0, length - length // 2), value=fill)])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    try:
        check_per_sample_gradients(
            model,
            lambda inputs: losses_of(model, inputs, precision=precision),
            alone=[batch, short],
            together=together,
            engine="book_keeping",
        )
    except ValueError as error:
        return str(error)
    return "accepted"


def measure(args: ContributionArguments, *, vocabulary: int, length: int, hidden: int, tied: bool) -> dict[str, Any]:
    """Return what one example contributes, and what the check says."""
    model = build(vocabulary=vocabulary, length=length, hidden=hidden, tied=tied, precision=args.precision)
    ids = torch.randint(vocabulary, (1, length))
    batch = {"input_ids": ids, "labels": ids}
    return {
        "vocabulary": vocabulary,
        "length": length,
        "hidden": hidden,
        "tied": tied,
        "contribution": contribution(model, batch, precision=args.precision),
        "check": check(model, batch, precision=args.precision) if args.check else "not run",
        "torch": torch.__version__,
        "settings": asdict(args),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every model at every length, and print one line for each."""
    with one_line_errors():
        (args,) = parse_args(ContributionArguments, argv=argv)
    torch.set_num_threads(args.threads)
    for vocabulary in map(int, args.vocabularies.split(",")):
        for length in map(int, args.lengths.split(",")):
            if vocabulary * length > args.most_logits:
                continue
            for hidden in map(int, args.hidden.split(",")):
                for tie in args.ties.split(","):
                    result = measure(args, vocabulary=vocabulary, length=length, hidden=hidden, tied=tie == "tied")
                    print(
                        f"{vocabulary:7,} words, {length:5,} tokens, hidden {hidden:4}, {tie:6}: "
                        f"{result['contribution']:.7f} C, check: {result['check'][:90]}",
                        flush=True,
                    )
                    append_json_line(result, args.output)


if __name__ == "__main__":
    main()
