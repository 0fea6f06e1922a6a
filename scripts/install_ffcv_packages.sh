#!/usr/bin/env bash
# The system packages that `pip install '.[ffcv]'` needs on Debian or Ubuntu: FFCV
# comes as source, and is compiled against OpenCV and libjpeg-turbo. Run it as root or with sudo.
set -euo pipefail
PYTHON=${PYTHON:-python3}

have_all() {
    command -v g++ pkg-config > /dev/null && pkg-config --exists opencv4 libturbojpeg &&
        PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q 'libGL\.so\.1' && have_headers
}

have_headers() {
    "$PYTHON" -c 'import os, sysconfig
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'
}

if have_all; then
    echo "FFCV's system packages are installed"
    exit 0
fi
if ! command -v apt-get > /dev/null; then
    echo "$0: no apt-get here: install g++, pkg-config, libGL, and the development files of" \
        "OpenCV 4, libturbojpeg and Python by your system's own means" >&2
    exit 1
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    # Without a terminal, sudo cannot ask for a password.
    if ! command -v sudo > /dev/null || { [ ! -t 0 ] && ! sudo -n true 2> /dev/null; }; then
        echo "$0: installing packages needs root or sudo: ask for" \
            "g++ pkg-config libopencv-dev libturbojpeg0-dev libgl1" >&2
        exit 1
    fi
    as_root=(sudo)
fi

packages=(g++ pkg-config libopencv-dev libturbojpeg0-dev libgl1)
have_headers || packages+=(python3-dev)
# Somebody else's apt may be at work: wait for it.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
"${apt[@]}" update
"${apt[@]}" install --yes --no-install-recommends "${packages[@]}" > /dev/null
if ! have_all; then
    echo "$0: the packages are installed, but g++, OpenCV 4, libturbojpeg, libGL or the headers of" \
        "$PYTHON are still missing" >&2
    exit 1
fi
