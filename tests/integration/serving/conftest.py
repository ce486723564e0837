"""The client `tinker` in an environment of its own, a small base, and an endpoint that serves it as a command."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLIENT = "RINGMASTER_TEST_CLIENT"  # the Python of an environment that has the client already
PACKAGES = ("tinker==0.38.0", "tinker-cookbook==0.5.8", "sympy", "pylatexenc", "math-verify")
COMMAND = "from ringmaster.flows.entry import process; process()"


@pytest.fixture(scope="session")
def client_python():
    """The Python of an environment with the client and its cookbook, which is made once and kept in .venv-tinker."""
    if CLIENT in os.environ:
        return os.environ[CLIENT]
    folder = ROOT / ".venv-tinker"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for packages in (("torch==2.13.0",), PACKAGES):
            done = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"the client cannot be installed: {done.stderr[-300:]}")
        (folder / "complete").touch()
    return str(python)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A Llama of two layers with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder = tmp_path_factory.mktemp("base")
    vocabulary = {character: i for i, character in enumerate(bytes_to_unicode().values())}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **special)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes, **heads
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class ServeCommand:
    """`ringmaster serve` of a base."""

    def __init__(self, folder, base, *, name="tiny", **options):
        self.home = folder / "home"
        self._file = folder / "endpoint.yaml"
        serve = {"bases": [{"name": name, "from_pretrained": str(base)}], "seq_len": 1024, "device": "cpu"}
        self._file.write_text(json.dumps({"name": "trial", "serve": serve | options}))

    @property
    def environment(self):
        return {**os.environ, "RINGMASTER_HOME": str(self.home), "PYTHONPATH": str(ROOT / "src")}

    def start(self):
        self.process = self._started("serve", self._file, "--json", stdout=subprocess.PIPE)
        line = self.process.stdout.readline()
        assert line, self.process.wait()
        self.answer = json.loads(line)
        return self

    def _started(self, *arguments, **options):
        command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
        return subprocess.Popen(command, env=self.environment, text=True, cwd=ROOT, **options)

    def run(self, *arguments):
        """Runs another command of the same home; returns its output."""
        output, _ = (process := self._started(*arguments, stdout=subprocess.PIPE)).communicate()
        assert process.returncode == 0, output
        return output

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.stdout.close()
        return self.process.wait()

    def client(self, python, *arguments, **options):
        """Starts a program in the client's environment."""
        environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            "TINKER_BASE_URL": self.answer["url"],
            "TINKER_API_KEY": self.answer["key"],
            "TINKER_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [python, "-W", "ignore", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=environment, **pipes, **options)


@contextmanager
def served(*arguments, **options):
    command = ServeCommand(*arguments, **options).start()
    try:
        yield command
    finally:
        command.end()
