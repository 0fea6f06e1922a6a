"""The lines of the two tables. Nothing is imported here: a peer that is missing is a line too."""

from peers.contract import Row

JPEG = ("simplejpeg", "opencv-python-headless")
TORCH = ("torch", "torchvision", "pillow")
DALI = "pip install nvidia-dali-cuda120"
CV2 = "pip install opencv-python-headless"
FFCV = (
    "scripts/install_ffcv_packages.sh; pip install numba; pip install --no-deps ffcv fastargs"
    " terminaltables pytorch-pfn-extras assertpy"
)
MOSAIC = "pip install mosaicml-streaming simplejpeg opencv-python-headless in a venv of its own;"
MOSAIC += " --python mosaic=VENV/bin/python"
SIMD = "pip install pillow-simd torch torchvision in a venv of its own;"
SIMD += " --python torch-simd=VENV/bin/python"

PEERS = (
    Row("torch-v1", "DataLoader, Pillow, transforms v1", "peers.torch_pillow:TorchPillow",
        {"version": "v1"}, TORCH, smoke=True),
    Row("torch-v2", "DataLoader, Pillow, transforms v2, uint8", "peers.torch_pillow:TorchPillow",
        {"version": "v2"}, TORCH),
    Row("torch-simd", "DataLoader, Pillow-SIMD, transforms v2, uint8",
        "peers.torch_pillow_simd:TorchPillowSimd", {"version": "v2"},
        ("torch", "torchvision", "pillow-simd"), SIMD),
    Row("torchcodec", "DataLoader, TorchCodec, transforms v2, uint8",
        "peers.torch_torchcodec:TorchTorchcodec", {}, ("torch", "torchvision", "torchcodec"),
        "pip install 'torchcodec>=0.16'", smoke=True),
    Row("torch-simplejpeg", "DataLoader, simplejpeg, OpenCV",
        "peers.torch_simplejpeg:TorchSimplejpeg", {}, ("torch", *JPEG), CV2),
    Row("threads", "thread pool, simplejpeg, OpenCV", "peers.thread_pool:ThreadPool", {}, JPEG,
        CV2, smoke=True),
    *(Row(f"echo-{k}", f"thread pool, naive echo buffer of 3 batches, {k} serves",
          "peers.echo_threads:EchoThreads", {"reuse": k}, JPEG, CV2, serves=k, smoke=k == 3)
      for k in (3, 6)),
    Row("dali", "DALI, CPU, fused", "peers.dali_fused:DaliFused", {},
        ("nvidia-dali-cuda120", "nvidia-dali-cuda130"), DALI, smoke=True),
    Row("dali-linear", "DALI, CPU, fused, antialias off", "peers.dali_fused:DaliFused",
        {"antialias": False}, ("nvidia-dali-cuda120", "nvidia-dali-cuda130"), DALI),
    Row("ffcv-jpg", "FFCV, jpg", "peers.ffcv_beton:FfcvPhotos", {"mode": "jpg"},
        ("ffcv", "numba"), FFCV, converts=True),
    Row("ffcv-raw", "FFCV, raw", "peers.ffcv_beton:FfcvPhotos", {"mode": "raw"},
        ("ffcv", "numba"), FFCV, converts=True),
    Row("spdl", "SPDL, simplejpeg, OpenCV", "peers.spdl_threads:SpdlThreads", {},
        ("spdl-core", *JPEG), "pip install spdl-core opencv-python-headless", smoke=True),
    Row("grain", "Grain, threads, simplejpeg, OpenCV", "peers.grain_threads:GrainThreads", {},
        ("grain", *JPEG), "pip install grain opencv-python-headless", smoke=True),
    Row("webdataset", "WebDataset, simplejpeg, OpenCV", "peers.webdataset_tar:WebDatasetTar", {},
        ("webdataset", *JPEG), "pip install webdataset opencv-python-headless", converts=True,
        smoke=True),
    Row("mosaic", "MosaicML Streaming, simplejpeg, OpenCV", "peers.mosaic_shards:MosaicShards",
        {}, ("mosaicml-streaming", "numpy", *JPEG), MOSAIC, converts=True, smoke=True),
)  # fmt: skip


def _ours(key: str, name: str, **options: object) -> Row:
    reuse = options["reuse"]
    assert isinstance(reuse, int)
    return Row(
        key, name, "peers.ours:OurPhotos", options, ("simplejpeg",), serves=reuse,
        group="ceiling" if "decoded" in options else "ours",
        smoke=key in ("ours-1", "ours-3", "ceiling"),
    )  # fmt: skip


OURS = (
    *(_ours(f"ours-{k}", f"ours, reuse {k}, cropped anew", reuse=k) for k in (1, 2, 3, 4, 6)),
    *(_ours(f"ours-{k}-short", f"ours, reuse {k}, short side 256, cropped anew", reuse=k,
            stored="short")
      for k in (1, 3, 6)),
    *(_ours(f"ours-{k}-crop", f"ours, reuse {k}, crop stored", reuse=k, stored="crop")
      for k in (1, 2, 3, 6)),
    *(_ours(f"ours-{k}-{where}", f"ours, reuse {k}, decoded cache in {where}, warm",
            reuse=k, cache=where)
      for where in ("ram", "disk") for k in (1, 2, 3)),
    *(Row(f"adopted-{k}", f"ours, reuse {k}, from_dataloader(ImageFolder), v2",
          "peers.ours:AdoptedPhotos", {"reuse": k, "version": "v2"}, TORCH, serves=k, group="ours",
          smoke=k == 3)
      for k in (1, 3, 6)),
    Row("adopted-3-v1", "ours, reuse 3, from_dataloader(ImageFolder), v1 floats",
        "peers.ours:AdoptedPhotos", {"reuse": 3, "version": "v1"}, TORCH, serves=3, group="ours"),
    _ours("ceiling", "ceiling: decoded already, cropped anew", reuse=1, decoded=True),
    _ours("ceiling-crop", "ceiling: cropped already, flipped", reuse=1, stored="crop",
          decoded=True),
    Row("memory", "ceiling: the batch's bytes, gathered", "peers.memory:MemoryCopy", {},
        ("numpy",), group="ceiling", smoke=True),
)  # fmt: skip

CIFAR10 = (
    Row("torch-v1", "DataLoader, a sample at a time, v1", "peers.cifar_torch:CifarTorch",
        {"version": "v1"}, TORCH, smoke=True),
    Row("torch-v2", "DataLoader, a sample at a time, v2", "peers.cifar_torch:CifarTorch",
        {"version": "v2"}, TORCH),
    Row("ffcv", "FFCV", "peers.ffcv_beton:FfcvCifar10", {}, ("ffcv", "numba"), FFCV,
        converts=True, smoke=True),
    Row("torch-batched", "torch, a batch at once", "peers.cifar_torch:CifarTorch",
        {"version": "batched"}, ("torch",), smoke=True),
    *(Row(f"ours-{k}", f"ours, reuse {k}", "peers.ours:OurCifar10", {"reuse": k}, ("torch",),
          serves=k, group="ours", smoke=True) for k in (1, 3)),
    Row("memory", "ceiling: the batch's bytes, gathered", "peers.memory:MemoryCopy", {},
        ("numpy",), group="ceiling", smoke=True),
)  # fmt: skip

SUITES = {"photos": (*PEERS, *OURS), "cifar10": CIFAR10}
