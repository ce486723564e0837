"""`teacher` of a loss: a frozen model, of an earlier job of the batch or pretrained, whose outputs a job learns."""
