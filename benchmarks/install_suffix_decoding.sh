#!/usr/bin/env bash
# arctic-inference's suffix decoding alone, in the environment of the given Python: the whole package
# asks for CUDA and another vLLM. cmake, ninja and nanobind are there already.
set -euo pipefail
PYTHON=$1
BUILD=$(mktemp -d)
trap 'rm -rf "$BUILD"' EXIT
"$PYTHON" -m pip download -q --no-deps --no-binary arctic-inference --no-build-isolation \
  -d "$BUILD" arctic-inference==0.1.1
tar -xzf "$BUILD"/arctic_inference-0.1.1.tar.gz -C "$BUILD" --strip-components 1
PATH="$(dirname "$PYTHON"):$PATH" cmake -S "$BUILD/csrc/suffix_decoding" -B "$BUILD/native" -G Ninja \
  -DPython_EXECUTABLE="$PYTHON" -DCMAKE_BUILD_TYPE=Release >&2
PATH="$(dirname "$PYTHON"):$PATH" cmake --build "$BUILD/native" >&2
TARGET="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/arctic_inference"
mkdir -p "$TARGET"
cp "$BUILD/arctic_inference/__init__.py" "$TARGET"
cp -r "$BUILD/arctic_inference/suffix_decoding" "$TARGET"
cp "$BUILD"/native/_C*.so "$TARGET/suffix_decoding"
"$PYTHON" -c 'from arctic_inference.suffix_decoding import SuffixDecodingCache'
