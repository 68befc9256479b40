# The workbook on MI355X: JupyterLab in AMD's serving image, which brings ROCm, torch and triton of its own.
#
#   docker build -t kernellib .
#   docker run --rm -it \
#     --device /dev/kfd --device /dev/dri --group-add video --group-add render \
#     --shm-size 64g --security-opt seccomp=unconfined \
#     -p 127.0.0.1:8888:8888 -v "$PWD/out:/opt/kernellib/out" kernellib
#
# Shared memory holds the symmetric heaps of the eight ranks; /dev/kfd and /dev/dri are the GPUs, which the
# video and render groups may open. Headless: append `python3 -m kernellib.workbook run --target mi355x`.
FROM vllm/vllm-openai-rocm:kimi-k3@sha256:5aa7e626ff73672f5ca7aae46754570488c23d33ca1ac90756a1d2d1a3fe099b

WORKDIR /opt/kernellib

# torch, triton, numpy and the ROCm stack stay the image's own: replacing them would replace the ROCm builds.
# --no-deps on flydsl and kernellib keeps pip from doing so; the rest has no compiled tie to torch.
RUN python3 -m pip install --no-cache-dir --no-deps \
        flydsl==0.5.0 \
        amd-mori==1.2.4 \
 && python3 -m pip install --no-cache-dir \
        ml_dtypes==0.6.0 \
        PyYAML==6.0.4 \
        typer==0.29.2 \
        rich==15.0.0 \
        jupyterlab==4.6.6 \
        ipykernel==7.4.0 \
        ipywidgets==8.1.9 \
        papermill==2.7.0 \
        nbformat==5.11.1 \
        nbclient==0.11.0 \
        nbconvert==7.17.2 \
        pillow==13.0.0 \
        matplotlib==3.11.2 \
        ipython==9.18.1 \
        jupyter_client==8.10.0 \
        pyzmq==27.3.0 \
        fastjsonschema==2.22.3 \
        jsonschema==4.26.0 \
        scipy==1.17.1 \
        pytest==9.2.0 \
        pytest-xdist==3.8.0 \
        pytest-timeout==2.4.0 \
        hypothesis==6.170.17

COPY pyproject.toml README.md LICENSE constraints.txt Makefile ./
COPY kernellib kernellib
COPY notebooks notebooks
COPY tests tests
RUN python3 -m pip install --no-cache-dir --no-deps --editable .

EXPOSE 8888
# The image's own entry point serves a model; this one opens the workbook. JupyterLab prints a URL with its token.
ENTRYPOINT []
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--allow-root", "--notebook-dir=/opt/kernellib/notebooks"]
