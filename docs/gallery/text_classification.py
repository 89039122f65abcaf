# %% [markdown]
# # Text classification
#
# A private classifier of film reviews: DistilBERT with LoRA on SST-2. `MODEL` and `DATA` are names on the hub. Without
# network access, set them to local folders: a saved model with its tokenizer, and a folder with `train.parquet` and
# `validation.parquet`.

# %%
import os

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import DataCollatorWithPadding

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main as doppler_hf_command

MODEL = os.environ.get("GALLERY_MODEL", "distilbert/distilbert-base-uncased")
DATA = os.environ.get("GALLERY_DATA", "stanfordnlp/sst2")

# %% [markdown]
# ## Data
#
# ε protects one record, here one sentence with its label. Everything that is fitted to the data would cost ε too, so the
# tokenizer is the one that the model was pretrained with.

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
data = load_dataset(DATA)
data = data.map(
    lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=64),
    batched=True,
    remove_columns=["sentence"],
)
train, validation = data["train"], data["validation"]

# %% [markdown]
# ## Model
#
# LoRA trains few parameters. That helps here, because noise is added to each of them.

# %%
model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=2)
model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16))

# %% [markdown]
# ## Training
#
# `target_epsilon` is how much privacy you want: smaller is more private, and from 1 to 8 is usual. The random batches are
# larger than without privacy, because the noise of a step is the same whatever the size of its batch. The learning rate is
# left out, so the trainer chooses one that suits the noise.

# %%
args = DopplerTrainingArguments(
    output_dir="text-classification",
    target_epsilon=3.0,
    per_device_train_batch_size=64,
    gradient_accumulation_steps=max(1, len(train) // 2000),
    num_train_epochs=3,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = DopplerTrainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=validation,
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=lambda prediction: {
        "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
    },
)
trainer.train()

# %% [markdown]
# ## What others get
#
# The output folder has the adapter, the privacy ledger, a model card that begins with privacy, and a picture of the training
# (`training_curve.png`, where matplotlib is installed). Anyone can verify the ledger: below in Python, or in a shell with
# `doppler-hf verify text-classification`.

# %%
trainer.save_model()
assert doppler_hf_command(["verify", "text-classification"]) == 0
