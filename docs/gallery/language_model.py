# %% [markdown]
# # Language model
#
# A private language model of reviews: DistilGPT-2 with LoRA. `MODEL` and `DATA` are names on the hub. Without network access,
# set them to local folders: a saved model with its tokenizer, and a folder with `train.parquet` and `test.parquet`, whose
# column `text` has the texts.

# %%
import os

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main as doppler_hf_command

MODEL = os.environ.get("GALLERY_MODEL", "distilbert/distilgpt2")
DATA = os.environ.get("GALLERY_DATA", "Yelp/yelp_review_full")

# %% [markdown]
# ## Data
#
# One row is one review, and ε protects one row. Do not join texts into blocks of equal length, as is usual without privacy: a
# block would mix several people's texts, and a text could be in two blocks.

# %%
tokenizer = AutoTokenizer.from_pretrained(MODEL)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
data = load_dataset(DATA)
data = data.map(
    lambda rows: tokenizer(rows["text"], truncation=True, max_length=64),
    batched=True,
    remove_columns=data["train"].column_names,
)
train = data["train"].select(range(min(20_000, len(data["train"]))))
test = data["test"].select(range(min(20_000, len(data["test"]))))

# %% [markdown]
# ## Model
#
# GPT-2 stores its weight matrices transposed, and `fan_in_fan_out=True` tells PEFT so.

# %%
model = AutoModelForCausalLM.from_pretrained(MODEL)
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=8, lora_alpha=16, fan_in_fan_out=True)
model = get_peft_model(model, lora)

# %% [markdown]
# ## Training
#
# The loss of a record is the mean over its own tokens. The logged training loss is clipped and has noise, and ε covers it.

# %%
args = DopplerTrainingArguments(
    output_dir="language-model",
    target_epsilon=8.0,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=max(1, len(train) // 1000),
    num_train_epochs=3,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
)
trainer = DopplerTrainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=test,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train()

# %% [markdown]
# ## A text
#
# What the model writes is computed from private weights, so it costs no further ε.

# %%
prompt = tokenizer("The food", return_tensors="pt").to(model.device)
written = model.generate(**prompt, max_new_tokens=8, pad_token_id=tokenizer.pad_token_id)
print(tokenizer.decode(written[0]))

# %% [markdown]
# ## What others get

# %%
trainer.save_model()
assert doppler_hf_command(["verify", "language-model"]) == 0
