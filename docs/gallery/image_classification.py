# %% [markdown]
# # Image classification
#
# A private classifier of small photographs: a pretrained vision transformer on CIFAR-10, of which only the head is trained.
# `MODEL` and `DATA` are names on the hub. Without network access, set them to local folders: a saved model with its image
# processor, and a folder with `train.parquet` and `test.parquet`, whose columns are `img` and `label`.

# %%
import os

from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModelForImageClassification

from doppler_hf import DopplerTrainer, DopplerTrainingArguments
from doppler_hf.cli import main as doppler_hf_command

MODEL = os.environ.get("GALLERY_MODEL", "google/vit-base-patch16-224-in21k")
DATA = os.environ.get("GALLERY_DATA", "uoft-cs/cifar10")

# %% [markdown]
# ## Data
#
# The images are prepared when they are fetched. A transform with randomness, such as a crop, belongs here, too.

# %%
processor = AutoImageProcessor.from_pretrained(MODEL)
data = load_dataset(DATA)
labels = data["train"].features["label"].names


def prepared(rows):
    images = processor([image.convert("RGB") for image in rows["img"]], return_tensors="pt")
    return {"pixel_values": images["pixel_values"], "labels": rows["label"]}


train, test = data["train"].with_transform(prepared), data["test"].with_transform(prepared)

# %% [markdown]
# ## Model
#
# The new head is all that is trained. The pretrained layers cost no ε, because they have not seen the private images.

# %%
model = AutoModelForImageClassification.from_pretrained(
    MODEL,
    num_labels=len(labels),
    id2label=dict(enumerate(labels)),
)
for name, parameter in model.named_parameters():
    parameter.requires_grad = name.startswith("classifier")

# %% [markdown]
# ## Training
#
# `remove_unused_columns=False` keeps the column `img`, which the transform needs and the model does not know.

# %%
args = DopplerTrainingArguments(
    output_dir="image-classification",
    target_epsilon=2.0,
    per_device_train_batch_size=64,
    gradient_accumulation_steps=max(1, len(train) // 2000),
    num_train_epochs=3,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    remove_unused_columns=False,
)
trainer = DopplerTrainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=test,
    processing_class=processor,
    compute_metrics=lambda prediction: {
        "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
    },
)
trainer.train()

# %% [markdown]
# ## What others get
#
# The output folder has the whole model with its privacy ledger, and a model card, because `create_model_card` asks for one.

# %%
trainer.save_model()
trainer.create_model_card()
assert doppler_hf_command(["verify", "image-classification"]) == 0
