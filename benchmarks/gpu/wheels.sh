#!/usr/bin/env bash
# What a GPU machine without network needs, gathered on one that has it:
#
#     benchmarks/gpu/wheels.sh few|core|roundpipe DIR      [PYTHON=...] [PY=3.12]
#     DIR/core/install.sh                                         there
#
# A part is a folder of its own.
#
#     few         what quarter.sh takes along: what a machine with torch, numpy, matplotlib and rich
#                 may still lack, 12 MB; quarter.sh unpacks it itself
#     core        lightning and what it needs, what `perfect` needs, torchmetrics; no torch
#     roundpipe   roundpipe, beartype; it does without transformers where stages are given to it
#
# torch and torchvision are never in a part: they must match the machine's CUDA. install.sh says
# which torch and torchvision it finds, installs what is missing with --no-deps, and ends with one
# import of each package, so that what does not work is known at once. Without torchvision only the
# parts with pictures fall away, and their rows say so.
set -euo pipefail
part=${1:?one of: few core roundpipe}
dir=${2:?a folder}
python=${PYTHON:-python3}
target=${PY:-3.12}
out=$dir/$part
mkdir -p "$out"
# What an earlier call left would be installed, too.
rm -f "$out"/*.whl "$out/install.sh"
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux_2_12 manylinux2014 manylinux2010; do
  platforms+=(--platform "${name}_x86_64")
done

fetch() {
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps -d "$out" \
    --python-version "$target" --implementation cp --abi "cp${target/./}" --abi abi3 --abi none \
    "${platforms[@]}" --only-binary=:all: "$@"
}

imports=()
case $part in
  few)
    fetch pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 \
      shtab==1.13.0 cryptography==50.0.2 cffi==2.1.1 pycparser==3.12 lightning==2.6.6 \
      pytorch-lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 nvidia-ml-py==13.615.71 \
      pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 execnet==2.1.2 pluggy==1.7.0 \
      iniconfig==2.3.1 hypothesis==6.170.15 sortedcontainers==2.4.0
    imports=(pydantic shtab cryptography lightning pytest)
    ;;
  core)
    fetch lightning==2.6.6 pytorch-lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 \
      pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 \
      typing-extensions==4.16.0 PyYAML==6.0.3 rich==15.0.0 markdown-it-py==4.3.0 \
      mdurl==0.1.2 Pygments==2.21.0 packaging==26.3 tqdm==4.70.1 fsspec==2026.9.0 \
      numpy==2.4.6 pillow==13.0.0 matplotlib==3.11.2 contourpy==1.3.3 cycler==0.12.1 \
      fonttools==4.68.0 kiwisolver==1.5.1 pyparsing==3.3.3 python-dateutil==4.0.0 \
      nvidia-ml-py==13.615.71 pytest==9.2.0 pytest-timeout==2.4.0 pluggy==1.7.0 iniconfig==2.3.1 \
      hypothesis==6.170.15 sortedcontainers==2.4.0
    imports=(lightning torchmetrics pydantic yaml rich matplotlib pynvml pytest)
    ;;
  roundpipe)
    fetch roundpipe==0.1.1 beartype==0.23.1 py-cpuinfo==9.0.0 ninja==1.13.2 tqdm==4.70.1 \
      typing-extensions==4.16.0
    imports=(roundpipe)
    ;;
  *)
    echo "no part $part: few, core, roundpipe" >&2
    exit 2
    ;;
esac

(cd "$out" && sha256sum -- *.whl > sums)
cat > "$out/install.sh" <<'INSTALL'
#!/usr/bin/env bash
# Installs what lies beside it, without network. [PYTHON=...] is the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
python=${PYTHON:-python3}
"$python" - <<'SAY'
import importlib.metadata as metadata
import importlib.util
for name in ("torch", "torchvision", "numpy"):
    there = importlib.util.find_spec(name) is not None
    print(name, metadata.version(name) if there else "is not installed", flush=True)
SAY
sha256sum --check --quiet sums || { echo "what came here is not what was gathered: copy it again" >&2; exit 1; }
# A package that the machine has already stays as it is: only what is missing comes in.
wanted=()
for wheel in *.whl; do
  name=${wheel%%-*}
  if ! "$python" -c "import importlib.metadata as m, sys; m.version(sys.argv[1])" "$name" 2> /dev/null; then
    wanted+=("$wheel")
  fi
done
if [ ${#wanted[@]} -gt 0 ]; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "${wanted[@]}"
fi
for name in IMPORTS; do
  # roundpipe asks for a GPU when it is imported.
  "$python" -c "import importlib, sys; importlib.import_module(sys.argv[1])" "$name" > /dev/null 2> "$name.log" \
    && echo "$name works" || { echo "$name does not work: $(tail -1 "$name.log")"; failed=1; }
done
exit "${failed:-0}"
INSTALL
sed -i "s/IMPORTS/${imports[*]}/" "$out/install.sh"
chmod +x "$out/install.sh"
echo "$part: $(ls "$out"/*.whl | wc -l) files, $(du -s --block-size=1M "$out" | cut -f1) MB"
