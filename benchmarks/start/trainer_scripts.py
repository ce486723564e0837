"""What a person writes by hand for one model: transformers' Trainer, and peft for an adapter. Reads one JSON argument.

The order of its imports, and what it does not import, is that of a script which trains this model alone.
"""

import json
import sys
import time


def main() -> None:
    """Trains one model according to the JSON argument, evaluates it, and saves it."""
    task = json.loads(sys.argv[1])
    from datasets import Dataset, load_dataset
    from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

    class FirstStep(TrainerCallback):
        """Prints when the first step has ended."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                print(json.dumps({"first_step_at": time.time()}), flush=True)

    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    rows = load_dataset("csv" if task["path"].endswith("csv") else "json", data_files=task["path"])["train"]
    parts = rows.train_test_split(test_size=0.1, seed=0)
    encode, collate = tokens_and_label, DataCollatorWithPadding(tokenizer)
    if task["name"] == "embedding":
        encode, collate = tokens_of_pairs, PairCollator(tokenizer)
    labels = sorted(set(rows["label"])) if "label" in rows.column_names and task["name"] != "regression" else None
    parts = parts.map(encode, fn_kwargs={"tokenizer": tokenizer, "labels": labels}, remove_columns=rows.column_names)
    model = model_of(task, num_labels=len(labels) if labels else 1)
    arguments = TrainingArguments(
        output_dir=task["folder"],
        max_steps=task["num_steps"],
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer_class = {"embedding": pair_trainer, "distilled": distilling_trainer}.get(task["name"], lambda _: Trainer)(
        task
    )
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=parts["train"], eval_dataset=parts["test"], data_collator=collate,
        callbacks=[FirstStep()],
    )  # fmt: skip
    assert isinstance(parts["train"], Dataset)
    started_s = time.perf_counter()
    trainer.train()
    training_s = time.perf_counter() - started_s
    if task["name"] != "embedding":
        trainer.evaluate()
    trainer.save_model(task["folder"])
    tokenizer.save_pretrained(task["folder"])
    print(json.dumps({"training_s": training_s}))


def tokens_and_label(row, *, tokenizer, labels):
    """Encodes a text with its label: the number of a class, or a number."""
    label = labels.index(row["label"]) if labels else float(row["label"])
    return {**tokenizer(row["text"], truncation=True, max_length=128), "labels": label}


def tokens_of_pairs(row, *, tokenizer, labels):
    """Encodes both texts of a pair."""
    del labels
    return {side: tokenizer(row[side], truncation=True, max_length=128)["input_ids"] for side in ("anchor", "positive")}


class PairCollator:
    """Pads the anchors and the positives of a batch to one width."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, rows):
        texts = [{"input_ids": row[side]} for side in ("anchor", "positive") for row in rows]
        return dict(self.tokenizer.pad(texts, return_tensors="pt"))


def model_of(task, *, num_labels):
    """Returns the model on its base, or of random weights where the task has a configuration."""
    import transformers

    architecture = transformers.BertModel if task["name"] == "embedding" else transformers.BertForSequenceClassification
    options = {} if task["name"] == "embedding" else {"num_labels": num_labels}
    if config := task.get("config"):
        return architecture(transformers.BertConfig(**config, **options))
    model = architecture.from_pretrained(task["base"], **options)
    if task["name"] == "lora":
        from peft import LoraConfig, TaskType, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["query", "key", "value"]),
        )
    if task["name"] == "head":
        for parameter in model.bert.parameters():
            parameter.requires_grad_(False)
    return model


def pair_trainer(task):
    """Returns a Trainer of the contrastive loss over the texts of a batch."""
    import torch
    from transformers import Trainer

    class PairTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            hidden = model(**inputs).last_hidden_state
            mask = inputs["attention_mask"].unsqueeze(-1)
            vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
            anchors, positives = vectors.chunk(2)
            loss = torch.nn.functional.cross_entropy(
                anchors @ positives.T / 0.05, torch.arange(len(anchors), device=anchors.device)
            )
            return (loss, None) if return_outputs else loss

    return PairTrainer


def distilling_trainer(task):
    """Returns a Trainer of the loss of the labels and of a teacher's logits."""
    import torch
    from transformers import BertForSequenceClassification, Trainer

    teacher = BertForSequenceClassification.from_pretrained(task["teacher"]).eval()

    class DistillingTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            output = model(**inputs)
            with torch.no_grad():
                target = teacher(**{k: v for k, v in inputs.items() if k != "labels"}).logits
            soft = torch.nn.functional.kl_div(
                torch.log_softmax(output.logits / 2, -1), torch.softmax(target / 2, -1), reduction="batchmean"
            )
            loss = 0.5 * output.loss + 0.5 * 4 * soft
            return (loss, output) if return_outputs else loss

    return DistillingTrainer


if __name__ == "__main__":
    main()
