#!/bin/sh
# Make a contestant's environment, .peers/NAME, with pinned versions.
#
#     benchmarks/peers/setup.sh bare|pfl|flwr|fedlab ...        (PYTHON=python3.11 for another Python, 3.11 or 3.12)
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)

for name in "$@"; do
    requirements="$here/requirements/$name.txt"
    [ -f "$requirements" ] || { echo "no such contestant: $name" >&2; exit 2; }
    environment="$root/.peers/$name"
    "${PYTHON:-python3}" -m venv "$environment"
    pip="$environment/bin/python -m pip install --quiet --constraint $here/requirements/common.txt"
    # PyTorch first and pinned: a framework's own wish for torch would bring another build, gigabytes larger.
    $pip --requirement "$here/requirements/common.txt"
    $pip --requirement "$requirements"
    # Without its dependencies: torchvision, which it asks for, is needed only for data sets that are not used here.
    if [ "$name" = fedlab ]; then $pip --no-deps fedlab==1.3.0; fi
    echo "$environment is ready"
done
