#!/usr/bin/env bash
# Install stepmark beside the torch that an image has, and never replace that torch.
#
#   containers/install.sh cuda|rocm|any [PREFIX]
#
# Run it in the root of the source tree. PREFIX [/opt/stepmark] becomes a virtual environment that
# also sees the packages of the image, so that none of them is changed. PYTHON is the interpreter
# that has torch [python3]. The first argument is the back end that torch must have.
set -euo pipefail

backend=${1:?"usage: install.sh cuda|rocm|any [PREFIX]"}
prefix=${2:-/opt/stepmark}
python=${PYTHON:-python3}

fail() {
  echo "install.sh: $1" >&2
  exit 1
}

torch_of() {
  "$1" -c 'import torch
backend = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
print(torch.__version__, backend, torch.__file__)'
}

case $backend in cuda | rocm | any) ;; *) fail "$backend is invalid: it must be cuda, rocm or any." ;; esac
image_torch=$(torch_of "$python") || fail "$python cannot import torch; name another by PYTHON."
read -r version found _ <<<"$image_torch"
[[ $backend == any || $backend == "$found" ]] ||
  fail "torch $version is built for $found, not for $backend: use another base image."

# 2.12.0a0+... of an NGC image counts as 2.12, although it sorts before 2.12.0.
"$python" - "$version" <<'EOF_PY'
import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
allowed = next(text for text in extras["measure"] if re.match(r"torch\b", text))
low, high = (tuple(map(int, text.split("."))) for text in re.findall(r"\d+\.\d+", allowed))
if not low <= tuple(map(int, re.findall(r"\d+", sys.argv[1])[:2])) < high:
    sys.exit(f"install.sh: torch {sys.argv[1]} is out of range: stepmark needs {allowed}.")
EOF_PY

# Without pip: Debian and Ubuntu need one more package for a venv with it.
"$python" -m venv --clear --without-pip --system-site-packages "$prefix"

# A venv of a venv sees only the packages of the outermost Python, so those between are added.
"$python" - "$("$prefix/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'EOF_PY'
import sys
import sysconfig
from pathlib import Path

if sys.prefix != sys.base_prefix:
    folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    lines = (f"import site; site.addsitedir({folder!r})\n" for folder in folders)
    Path(sys.argv[1], "image-packages.pth").write_text("".join(lines))
EOF_PY

# The constraint takes the place of the image's own, which pins packages that stepmark brings.
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo "torch==$version" >"$constraint"
export PIP_CONSTRAINT=$constraint PIP_DISABLE_PIP_VERSION_CHECK=1
pip_install() { "$python" -m pip --python "$prefix/bin/python" install --quiet "$@"; }
pip_install -r requirements.lock
pip_install --no-deps --no-build-isolation .

[[ $(torch_of "$prefix/bin/python") == "$image_torch" ]] || fail "torch $version was replaced."

# The image's torchrun starts the image's Python, which has no stepmark.
cat >"$prefix/bin/torchrun" <<EOF_SH
#!/bin/sh
exec "$prefix/bin/python" -m torch.distributed.run "\$@"
EOF_SH
chmod +x "$prefix/bin/torchrun"

"$prefix/bin/stepmark" --version
