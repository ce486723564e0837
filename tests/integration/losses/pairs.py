"""Data factories of pairs of sequences, for tests of losses that compare them."""

import torch
from torch.nn import functional

PAD, END, VOCAB_SIZE = 0, 1, 64


class Preferences:
    """Pairs of a prompt and a chosen or rejected answer, of different lengths; padded on the right."""

    vocab_size = VOCAB_SIZE

    def __init__(self, num, seq_len, seed):
        draw = torch.Generator().manual_seed(seed)
        self._samples = [self._row(seq_len, draw) for _ in range(num)]

    def _row(self, seq_len, draw):
        def tokens(fewest, most):
            length = int(torch.randint(fewest, most + 1, (), generator=draw))
            return torch.randint(2, VOCAB_SIZE, (length,), generator=draw)

        prompt = tokens(2, seq_len // 3)
        ids = torch.full((2, seq_len), PAD)
        labels = torch.full((2, seq_len), -100)
        for i in range(2):
            answer = torch.cat([tokens(1, seq_len - len(prompt) - 1), torch.tensor([END])])
            whole = torch.cat([prompt, answer])
            ids[i, : len(whole)] = whole
            labels[i, len(prompt) : len(whole)] = answer
        return {"input_ids": ids, "labels": labels}

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        return dict(self._samples[index])


def preferences(num=48, seq_len=24):
    return Preferences(num, seq_len, 0), Preferences(12, seq_len, 1)


class Texts(Preferences):
    """Pairs of an anchor and a positive, with attention masks."""

    def __getitem__(self, index):
        ids = self._samples[index]["input_ids"]
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def texts(num=48, seq_len=16):
    return Texts(num, seq_len, 0), Texts(12, seq_len, 1)


class Answers(Preferences):
    """The chosen answers alone, as samples of a language model."""

    def __getitem__(self, index):
        return {name: pair[0] for name, pair in self._samples[index].items()}


def answers(num=48, seq_len=24):
    return Answers(num, seq_len, 0), Answers(12, seq_len, 1)


class Passages(Preferences):
    """Each answer behind two prompts, with a score for each."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {**sample, "passage_scores": torch.tensor([index % 5, 1.0])}


def passages(num=48, seq_len=24):
    return Passages(num, seq_len, 0), Passages(12, seq_len, 1)


class Unpaired(Preferences):
    """The chosen answers alone, of which every third is not desirable, with room for a prompt with another answer."""

    def __getitem__(self, index):
        pair = super().__getitem__(index)
        fill, room = {"input_ids": PAD, "labels": -100}, (0, pair["labels"].shape[1])
        sample = {name: functional.pad(tokens[0], room, value=fill[name]) for name, tokens in pair.items()}
        return {**sample, "desirable": torch.tensor(int(index % 3 > 0))}


def unpaired(num=48, seq_len=24):
    return Unpaired(num, seq_len, 0), Unpaired(12, seq_len, 1)


class Compared(Texts):
    """Pairs of answers for reward models, with a margin."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "margin": torch.tensor(index % 4 / 4)}


def compared(num=48, seq_len=24):
    return Compared(num, seq_len, 0), Compared(12, seq_len, 1)
