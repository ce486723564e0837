"""A program of the client `tinker` that trains for some steps, and prints the loss of each as its bits: `... STEPS`."""

import sys

import tinker
from tinker import types

service = tinker.ServiceClient()
client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
for step in range(int(sys.argv[1])):
    tokens = [1 + step, 2, 3, 4]
    inputs = {"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4}
    row = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    loss = client.forward_backward([row], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    print(step, loss.result().metrics["loss:sum"].hex(), flush=True)
