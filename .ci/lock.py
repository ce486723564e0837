"""Writes requirements.txt: the versions and hashes of the whole environment, for every platform and Python version.

`make lock` runs it. `uv` resolves pyproject.toml with all extras. Two things that `uv` cannot express are added here:

- torch has builds for CPUs and for CUDA of one version, on different indexes. Its entry gets the hashes of all of them,
  so that the entry holds for whichever build an index offers.
- CUDA's libraries are needed by one of these builds only. They are at the end of the file, after `CUDA_HEADING`.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where PYTHONSAFEPATH is set, too
from lock_file import CUDA_HEADING, LOCK, ROOT, LockedPackage, read_lock

HEAD = """\
# The versions of the whole environment that were tested together, with their hashes. `make lock` writes this file.
# pyproject.toml says which other versions may work. torch's hashes are those of its builds for CPUs and for CUDA.
"""
# Versions that are younger may be withdrawn again, or turn out to be malicious.
COOL_DOWN = "7 days"
CUDA_PACKAGE = re.compile(r"(nvidia|cuda)-|triton$")


def resolve(options: list[str]) -> list[LockedPackage]:
    """Returns the packages of a resolution by uv. Versions of the present lock stay, unless options upgrade them."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header", "--universal"]
    command += ["--python-version", "3.11", "--all-extras", "--generate-hashes", "--exclude-newer", COOL_DOWN]
    subprocess.run([*command, *options, "--output-file", str(LOCK), "pyproject.toml"], cwd=ROOT, check=True)
    return read_lock(LOCK.read_text())


def hashes_of_builds(place: str, *, version: str) -> set[str]:
    """Returns the hashes of the builds of torch for Linux in a folder of wheels, or on the page of an index."""
    name = rf"torch-{re.escape(version)}(\+|%2B)[a-z0-9.]+-cp3\d+-cp3\d+-[a-z0-9_]*linux[a-z0-9_]+\.whl"
    if "://" not in place:
        wheels = [wheel for wheel in Path(place).iterdir() if re.fullmatch(name, wheel.name)]
        return {f"sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" for wheel in wheels}
    address = urllib.parse.urlsplit(place)
    if address.scheme != "https":
        raise SystemExit(f"{place} is not read: hashes have to come by https. To fix: give an address of https://.")
    connection = http.client.HTTPSConnection(address.netloc)
    connection.request("GET", f"{address.path.rstrip('/')}/torch/")
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"{place} has no page of torch: {answer.status} {answer.reason}")
    text = answer.read().decode()
    return {f"sha256:{match['hash']}" for match in re.finditer(rf"{name}#sha256=(?P<hash>[0-9a-f]{{64}})", text)}


def with_hashes(text: str, hashes: set[str]) -> str:
    """Returns an entry's text with other hashes."""
    lines = " \\\n".join(f"    --hash={each}" for each in sorted(hashes))
    return re.sub(r"(    --hash=\S+(?: \\)?\n)+", lambda _: f"{lines}\n", text)


def torch_of(packages: list[LockedPackage]) -> LockedPackage:
    """Returns torch."""
    return next(package for package in packages if package.name == "torch")


def is_for_cuda(package: LockedPackage) -> bool:
    """Tells whether only torch's build for CUDA needs a package."""
    return bool(CUDA_PACKAGE.match(package.name)) and "(pyproject.toml)" not in package.text


def main() -> None:
    """Writes the lock."""
    parser = argparse.ArgumentParser(description="Write requirements.txt. Other options are those of `uv pip compile`.")
    parser.add_argument("--torch", metavar="PLACE", help="also allow the builds of torch in this index or folder")
    options, options_of_uv = parser.parse_known_args()
    text = LOCK.read_text()
    before = torch_of(read_lock(text))
    # uv keeps the hashes that it finds, and asks no index for others.
    LOCK.write_text(text.replace(before.text, f"torch=={before.version}\n"))
    packages = resolve(options_of_uv)
    torch = torch_of(packages)
    hashes = set(torch.hashes)
    if before.version == torch.version:
        hashes |= before.hashes
    if options.torch:
        hashes |= hashes_of_builds(options.torch, version=torch.version)
    texts = {package: package.text for package in packages}
    texts[torch] = with_hashes(torch.text, hashes)
    everywhere = "".join(text for package, text in texts.items() if not is_for_cuda(package))
    cuda = "".join(text for package, text in texts.items() if is_for_cuda(package))
    LOCK.write_text(f"{HEAD}\n{everywhere}\n{CUDA_HEADING}{cuda}")


if __name__ == "__main__":
    main()
