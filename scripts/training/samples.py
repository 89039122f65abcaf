"""Sample texts from a finished model, batch by batch. What is written remains after an interruption.

Privacy: the texts follow from the saved model and from public numbers. The filter compares generated texts with one another
only; a comparison with the private texts would need its own ε.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, GenerationConfig, set_seed

from doppler_hf.errors import Failure, Refusal
from doppler_hf.privacy.ledger.file import write_whole
from doppler_hf.privacy.ledger.weights import hashes
from scripts.training.labelled_texts import prompt_of
from scripts.training.models import load_tokenizer

_PARTS: Final = "batches"
_SETTINGS: Final = "settings.json"
_PATIENCE: Final = 20  # So many batches in a row without a single new text end the sampling of a label.


@dataclass(frozen=True)
class Sampling:
    """How texts are sampled and filtered."""

    temperature: float
    top_p: float
    batch_size: int
    min_words: int
    max_length: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse values with which nothing can be sampled."""
        for name, value in (("temperature", self.temperature), ("sampling_batch_size", self.batch_size)):
            if not value > 0:
                raise Refusal("bad-sampling-value", f"Expected a number above 0 for --{name}; got {value}.")
        if not 0.0 < self.top_p <= 1.0:
            raise Refusal("bad-top-p", f"Expected a probability above 0 and up to 1 for --top_p; got {self.top_p}.")


@dataclass
class Samples:
    """The texts that were kept, as pairs of label and text, and how many were left out for which reason."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)

    def add(self, label: str, texts: list[str], *, at_most: int, min_words: int) -> int:
        """Keep the new ones of a batch of texts, and return how many they are."""
        kept = 0
        for text in texts:
            words = text.split()
            same = " ".join(words).casefold()  # Texts that differ only in case or white space count as duplicates.
            if len(words) < min_words:
                self.left_out["too short"] += 1
            elif any(line.lstrip().startswith("label:") for line in text.splitlines()):
                self.left_out["contains a prompt"] += 1
            elif same in self._seen:
                self.left_out["duplicate"] += 1
            elif kept < at_most:
                self._seen.add(same)
                self.texts.append((label, text))
                kept += 1
        return kept


def sample(
    model_folder: Path, folder: Path, numbers: Mapping[str, int], sampling: Sampling, *, device: Any, dtype: str
) -> Samples:
    """Sample as many texts of each label as asked for, and write every batch as soon as it is made.

    The random numbers of a batch depend on the seed, the label and the number of the batch. So an interrupted run
    continues with the texts that an uninterrupted one would have written.
    """
    parts = folder / _PARTS
    parts.mkdir(parents=True, exist_ok=True)
    # The numbers are not among them: whoever asks for more texts gets those that are there, and further ones.
    settings = {**asdict(sampling), "model": hashes(model_folder)}
    if not (parts / _SETTINGS).exists():
        write_whole(parts / _SETTINGS, json.dumps(settings))
    elif json.loads((parts / _SETTINGS).read_text("utf-8")) != settings:
        raise Refusal(
            "other-samples",
            f"The folder {folder} has texts that were sampled from another model, or with other settings. Give "
            "another --synthetic_dir.",
        )

    samples, writer = Samples(), None
    with tqdm(total=sum(numbers.values()), desc="sample", unit="text") as progress:
        for place, (label, number) in enumerate(numbers.items()):
            kept = batch = fruitless = 0
            while kept < number:
                path = parts / f"{place:03d}-{batch:06d}.json"
                if path.exists():
                    texts = json.loads(path.read_text("utf-8"))
                else:
                    writer = writer or _Writer(model_folder, sampling, device=device, dtype=dtype)
                    texts = writer.write(label, seed=_seed(sampling.seed, place, batch))
                    write_whole(path, json.dumps(texts, ensure_ascii=False))
                new = samples.add(label, texts, at_most=number - kept, min_words=sampling.min_words)
                kept, batch, fruitless = kept + new, batch + 1, 0 if new else fruitless + 1
                progress.update(new)
                if fruitless == _PATIENCE:
                    raise Failure(
                        "no-new-texts",
                        f"The model wrote no new text with the label {label!r} in {_PATIENCE} batches: {kept:,} of "
                        f"{number:,} are there. Of all texts, these were left out: {dict(samples.left_out)}. Ask for fewer "
                        "with --num_samples. Or raise --temperature or lower --min_words, with another --synthetic_dir. "
                        "The model is finished, so this costs no further ε.",
                    )
    return samples


class _Writer:
    """A model that writes texts after the prompt of a label."""

    def __init__(self, folder: Path, sampling: Sampling, *, device: Any, dtype: str) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        # If the folder has an adapter, Transformers loads its base model and the adapter.
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._sampling = sampling

    def write(self, label: str, *, seed: int) -> list[str]:
        """Return one batch of texts."""
        sampling, tokenizer = self._sampling, self._tokenizer
        max_length = min(sampling.max_length, tokenizer.model_max_length)
        prompt = prompt_of(label, tokenizer, shorter_than=max_length)
        ids = torch.tensor([prompt] * sampling.batch_size, device=self._model.device)
        # All values are given, because a model's own configuration may have others, such as a repetition penalty.
        config = GenerationConfig(
            do_sample=True,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            repetition_penalty=1.0,
            max_new_tokens=max_length - len(prompt),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        set_seed(seed)
        with torch.inference_mode():
            written = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        texts = tokenizer.batch_decode(written[:, len(prompt) :], skip_special_tokens=True)
        return [text.strip() for text in texts]


def _seed(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4])
