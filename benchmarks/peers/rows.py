"""The lines of the table. Nothing is imported here: a peer that is missing is a line too."""

from benchmarks.peers.contract import Row

JPEG = ("simplejpeg", "opencv-python-headless")
TORCH = ("torch", "torchvision", "pillow")
DALI = "pip install nvidia-dali-cuda120"
CV2 = "pip install opencv-python-headless"
FFCV = (
    "scripts/install_ffcv_packages.sh; pip install numba; pip install --no-deps ffcv fastargs"
    " terminaltables pytorch-pfn-extras assertpy"
)

PEERS = (
    Row("torch-floats", "DataLoader, Pillow, Resize and floats", "peers.torch_pillow:TorchPillow",
        {"version": "floats"}, TORCH, smoke=True, asked=True),
    Row("torch-v2", "DataLoader, Pillow, transforms v2, uint8", "peers.torch_pillow:TorchPillow",
        {"version": "v2"}, TORCH),
    Row("torchcodec", "DataLoader, TorchCodec, transforms v2, uint8",
        "peers.torch_torchcodec:TorchTorchcodec", {}, ("torch", "torchvision", "torchcodec"),
        "pip install 'torchcodec>=0.16'", smoke=True, asked=True),
    Row("torch-large", "DataLoader, 1920x1440, decode_jpeg, transforms v2, uint8",
        "peers.torch_pillow:TorchDecodeJpeg", {}, TORCH, large=True, asked=True),
    Row("threads", "thread pool, simplejpeg, OpenCV", "peers.thread_pool:ThreadPool", {}, JPEG,
        CV2, smoke=True, asked=True),
    Row("dali", "DALI, CPU, fused", "peers.dali_fused:DaliFused", {},
        ("nvidia-dali-cuda120", "nvidia-dali-cuda130"), DALI, smoke=True, asked=True),
    Row("dali-linear", "DALI, CPU, fused, antialias off", "peers.dali_fused:DaliFused",
        {"antialias": False}, ("nvidia-dali-cuda120", "nvidia-dali-cuda130"), DALI, asked=True),
    Row("ffcv-jpg", "FFCV, jpg", "peers.ffcv_beton:FfcvPhotos", {"mode": "jpg"},
        ("ffcv", "numba"), FFCV, converts=True, asked=True),
    Row("ffcv-raw", "FFCV, raw", "peers.ffcv_beton:FfcvPhotos", {"mode": "raw"},
        ("ffcv", "numba"), FFCV, converts=True),
    Row("spdl", "SPDL, simplejpeg, OpenCV", "peers.spdl_threads:SpdlThreads", {},
        ("spdl-core", *JPEG), "pip install spdl-core opencv-python-headless", smoke=True,
        asked=True),
    Row("grain", "Grain, threads, simplejpeg, OpenCV", "peers.grain_threads:GrainThreads", {},
        ("grain", *JPEG), "pip install grain opencv-python-headless", smoke=True, asked=True),
)  # fmt: skip


def _ours(key: str, name: str, **options: object) -> Row:
    reuse = options["reuse"]
    assert isinstance(reuse, int)
    return Row(
        key, name, "peers.ours:OurPhotos", options, ("pillow",), serves=reuse,
        smoke=key in ("ours-1", "ours-3", "ceiling"),
        asked=key in ("ours-1", "ours-3", "ours-3-whole"),
    )  # fmt: skip


OURS = (
    *(_ours(f"ours-{k}", f"ours, reuse {k}, cropped anew", reuse=k) for k in (1, 2, 3, 4, 6)),
    _ours("ours-3-whole", "ours, reuse 3, pictures decoded and kept whole", reuse=3, whole=True),
    *(_ours(f"ours-{k}-{where}", f"ours, reuse {k}, decoded cache in {where}, warm",
            reuse=k, cache=where)
      for where in ("ram", "disk") for k in (1, 2, 3)),
    *(Row(f"adopted-{k}", f"ours, reuse {k}, from_dataloader(ImageFolder), v2",
          "peers.ours:AdoptedPhotos", {"reuse": k, "version": "v2"}, TORCH, serves=k,
          smoke=k == 3)
      for k in (1, 3, 6)),
    *(Row(f"adopted-{k}-floats", f"ours, reuse {k}, from_dataloader(ImageFolder), Resize, floats",
          "peers.ours:AdoptedPhotos", {"reuse": k, "version": "floats"}, TORCH, serves=k,
          asked=True) for k in (1, 3)),
    *(Row(f"adopted-1-{how}", f"ours, reuse 1, 1920x1440, from_dataloader(ImageFolder), {how}",
          "peers.ours:AdoptedPhotos", {"reuse": 1, "version": "v2", "decode": how}, TORCH,
          large=True, asked=True) for how in ("exact", "scaled")),
    _ours("ceiling", "ceiling: decoded already, cropped anew", reuse=1, decoded=True),
    Row("memory", "ceiling: the batch's bytes, gathered", "peers.memory:MemoryCopy", {},
        ("numpy",), smoke=True),
)  # fmt: skip

ROWS = (*PEERS, *OURS)
DECODE_EVERY_TIME = tuple(
    row.key for row in PEERS if row.asked and not row.large and row.key != "torch-floats"
)
ASKED = (
    ("native crops of 224, reuse 1, over the cheapest peer", "ours-1", DECODE_EVERY_TIME, 0.8),
    ("native, reuse 3, over pictures decoded whole", "ours-3", ("ours-3-whole",), 0.92),
    ("adopted, floats, reuse 1, over its DataLoader", "adopted-1-floats", ("torch-floats",), 0.6),
    ("adopted, floats, reuse 3, over its DataLoader", "adopted-3-floats", ("torch-floats",), 0.22),
    ("1920x1440, adopted, exact, over decode_jpeg", "adopted-1-exact", ("torch-large",), 1.0),
    ("1920x1440, adopted, scaled, over decode_jpeg", "adopted-1-scaled", ("torch-large",), 0.7),
)
"""What was asked of us: CPU time of a served picture, ours over the cheapest of theirs, at most."""
