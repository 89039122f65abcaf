"""A trainer of preferences for a tiny model, and rows of each format. Its import needs the extra trl."""

import functools

from datasets import Dataset

from doppler_hf import DopplerDPOConfig, DopplerDPOTrainer
from tests.support import chat
from tests.support.chat import LORA, arguments_of, chat_tokenizer, tiny_llama

# A data set, the adapters, and what the model reads before and in the answers, without the end of the text.
FORMATS = {
    "prompt": (chat.preferences, None, lambda q, a: (q, f" {a}")),
    "implicit": (chat.implicit_preferences, None, lambda q, a: (f"{q} ", a)),
    "conversation": (chat.conversational_preferences, LORA, lambda q, a: (f"<|user|>{q}<|assistant|>", a)),
}

arguments = functools.partial(arguments_of, cls=DopplerDPOConfig)


def trainer_of(folder, name="prompt", *, cls=DopplerDPOTrainer, model=None, data=None, ref_model=None, **options):
    make, adapters, _ = FORMATS[name]
    data = make() if data is None else data
    return cls(
        model=tiny_llama() if model is None else model,
        ref_model=ref_model,
        args=arguments(folder, **options),
        train_dataset=data,
        eval_dataset=Dataset.from_list([*data.select(range(min(4, len(data))))]) if isinstance(data, Dataset) else None,
        processing_class=chat_tokenizer(),
        peft_config=adapters,
    )
