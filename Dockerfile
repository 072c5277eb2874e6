# docker build -t altup . && docker run --rm --gpus all -v "$PWD:/work" altup doctor
FROM python:3.11-slim
# Triton compiles a launcher for each kernel with the C compiler that it finds.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip install --no-cache-dir --constraint /src/constraints.txt '/src[all]'
WORKDIR /work
ENTRYPOINT ["altup"]
