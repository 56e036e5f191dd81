"""Downloads a model from the Hugging Face hub: once, at a pinned revision, before any GPU is leased."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from draftmill.errors import UserError

log = logging.getLogger("fetch_model")

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]
SPARE_BYTES = 2 << 30


def fetch(model: dict[str, Any]) -> Path:
    """The local folder of the hub model of the config's ``model`` block; resumes a broken download.

    Raises UserError when the hub does not answer, the revision does not exist, or the disk is too small.
    """
    name, revision = str(model["path"]), str(model["revision"])
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        files = HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
        size = sum(f.size or 0 for f in files if Path(f.rfilename).match("*.safetensors"))
        cache = Path(constants.HF_HUB_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
        if size + SPARE_BYTES > free:
            raise UserError(
                f"The model {name} needs {size / 1e9:.1f} GB, and the disk of the model cache {cache} has "
                f"{free / 1e9:.1f} GB left; make room, or point HF_HOME to another disk."
            )
        log.info("downloading %s at %s: %.1f GB to %s", name, revision, size / 1e9, cache)
        return Path(snapshot_download(name, revision=revision, allow_patterns=WANTED))
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as fault:
        raise UserError(
            f"The model {name} at revision {revision} cannot be fetched ({str(fault).partition(chr(10))[0]}); "
            "check model.path, model.revision and the network, or give a local folder."
        ) from fault
