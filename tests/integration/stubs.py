"""What the tests' jobs name: losses, factories and techniques that misbehave on purpose."""

from torch.nn.functional import cross_entropy


def loss_of_some_tokens(output, batch):
    """Counts the tokens whose id is even: of each row another number."""
    logits, labels = output.logits[:, :-1], batch["input_ids"][:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    counts = (labels.flatten() % 2 == 0).float()
    return (losses * counts).sum(), counts.sum()
