# SPDX-License-Identifier: Apache-2.0
"""Adapts a job folder: reads its configurations, applies the component mapping, and writes them back atomically.

The command `nvflare-lazy adapt` and `make_lazy` use it. Nothing in the job is run or imported.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory

from nvflare_lazy.errors import JobAdaptationError
from nvflare_lazy.flare.adaptation.component_mapping import AdaptationOptions, SiteConfig, adapt_configs
from nvflare_lazy.flare.adaptation.config_text import ConfigText

_SERVER, _CLIENT, _META = "config_fed_server", "config_fed_client", "meta"
_SUFFIXES = (".json", ".conf", ".yml")  # in the order in which NVFlare looks for them
_INITIAL_CHECKPOINT_KEY = "APP_CKPT"


@dataclass
class AdaptedJob:
    """A job folder and the new texts of its configurations; nothing is written before `write`.

    Args:
        folder: The job folder.
        notes: The components that were kept, and other remarks.
    """

    folder: Path
    notes: list[str]
    _texts: dict[Path, tuple[str, str]] = field(default_factory=dict)

    @property
    def changed(self) -> list[Path]:
        """The files that change."""
        return [path for path, (old, new) in self._texts.items() if old != new]

    def diff(self) -> str:
        """Return the changes as a unified diff."""
        lines: list[str] = []
        for path in self.changed:
            name = str(path.relative_to(self.folder))
            old, new = (text.splitlines() for text in self._texts[path])
            lines += difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")
        return "\n".join(lines)

    def write(self, out: Path | None = None) -> None:
        """Write the job, in place or to another folder, which must not exist.

        The new files are complete before the first one is replaced.
        """
        if out is None:
            _replace_all({path: self._texts[path] for path in self.changed})
            return
        if out.exists() or out.is_symlink():
            raise JobAdaptationError(f"{out} exists; remove it, or choose another output folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            copy = staging / out.name
            shutil.copytree(self.folder, copy, symlinks=True)
            for path in self.changed:
                (copy / path.relative_to(self.folder)).write_bytes(self._texts[path][1].encode())
            copy.rename(out)
        finally:
            shutil.rmtree(staging)


def adapt_job(folder: str | os.PathLike[str], level: int, options: AdaptationOptions | None = None) -> AdaptedJob:
    """Adapt a job folder to a level.

    Args:
        folder: The folder, with `meta.json` and the apps.
        level: The level; see `adapt_configs`.
        options: Arguments of the components.

    Raises:
        JobAdaptationError: If the folder is not a job, or a component cannot be mapped.
    """
    folder = Path(folder)
    files = [_ConfigFile(path, folder, is_server=is_server) for path, is_server in _config_files(folder)]
    if level >= 2:
        for app in {file.path.parent for file in files if file.is_server}:
            _refuse_preloaded_checkpoint(app, folder)
    try:
        notes = adapt_configs([file.edited for file in files], level, options)
        # The same for the values that NVFlare reads: `new_text` compares the two.
        adapt_configs([file.read for file in files], level, options)
    except (AttributeError, TypeError) as error:
        raise JobAdaptationError(f"{folder}: the configuration has an unexpected form ({error})") from error
    return AdaptedJob(folder, notes, {file.path: (file.text, file.new_text()) for file in files})


class _ConfigFile:
    """A configuration: its text, the data of the text, and the data that NVFlare reads from it."""

    def __init__(self, path: Path, folder: Path, *, is_server: bool) -> None:
        self.path = path
        self.is_server = is_server
        self._name = str(path.relative_to(folder))
        self.text = _read(path, self._name)
        self._strict_json = path.suffix == ".json"
        try:
            data = self._parsed(self.text)
            self._editor = ConfigText(self.text, strict_json=self._strict_json)
        except JobAdaptationError as error:
            raise JobAdaptationError(f"cannot edit {self._name}, {error}") from None
        self.read = SiteConfig(self._name, is_server, data)
        self.edited = SiteConfig(self._name, is_server, deepcopy(self._editor.data))

    def new_text(self) -> str:
        text = self._editor.with_data(self.edited.data)
        if self._parsed(text) != self.read.data:
            raise JobAdaptationError(
                f"cannot edit {self._name}: a component depends on a substitution or another construct of HOCON; "
                "write the components out, or use JSON"
            )
        return text

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            data = json.loads(text) if self._strict_json else _parsed_hocon(text)
        except Exception as error:  # pyhocon raises various errors
            raise JobAdaptationError(f"not valid {'JSON' if self._strict_json else 'HOCON'}: {error}") from None
        if not isinstance(data, dict):
            raise JobAdaptationError("not an object")
        return data


def _config_files(folder: Path) -> Iterable[tuple[Path, bool]]:
    """Return the configurations of a job's apps, and for each whether it is the server's."""
    if not folder.is_dir():
        raise JobAdaptationError(f"{folder} is not a folder; give the folder of a job, which has a meta.json")
    meta = _find(folder, _META)
    if meta is None:
        raise JobAdaptationError(f"{folder} has no meta.json; give the folder of a job, for example from recipe.export")
    deploy_map = _load(meta, folder).get("deploy_map")
    if not isinstance(deploy_map, dict) or not deploy_map:
        raise JobAdaptationError(f"{meta}: deploy_map must name the apps of the job")
    found = []
    for app in deploy_map:
        config = folder / app / "config"
        if Path(app).name != app or not config.is_dir():
            raise JobAdaptationError(f"{meta}: deploy_map names the app {app!r}, and {config} is not a folder")
        paths = [(path, name == _SERVER) for name in (_SERVER, _CLIENT) if (path := _find(config, name))]
        if not paths:
            raise JobAdaptationError(f"{config} has no {_SERVER} and no {_CLIENT} file")
        found += paths
    return found


def _find(folder: Path, name: str) -> Path | None:
    """Return the file that NVFlare would read."""
    path = next((path for suffix in _SUFFIXES if (path := folder / f"{name}{suffix}").is_file()), None)
    if path is not None and path.suffix == ".yml":
        raise JobAdaptationError(f"{path} is YAML, which cannot be edited; convert it to JSON")
    return path


def _load(path: Path, folder: Path) -> dict[str, Any]:
    text = _read(path, str(path.relative_to(folder)))
    try:
        data = json.loads(text) if path.suffix == ".json" else _parsed_hocon(text)
    except Exception as error:  # pyhocon raises various errors
        raise JobAdaptationError(f"{path}: {error}") from None
    return data if isinstance(data, dict) else {}


def _parsed_hocon(text: str) -> Any:
    return ConfigFactory.get_config_loader(ConfigFormat.PYHOCON).load_config_from_str(text).to_dict()


def _read(path: Path, name: str) -> str:
    try:
        # Not `read_text`, which would change the ends of lines.
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise JobAdaptationError(f"{name} is not UTF-8: {error}") from None


def _refuse_preloaded_checkpoint(config: Path, folder: Path) -> None:
    """Raise an error if `PTFileModelPersistor` would start from the checkpoint that an environment file names."""
    for path in sorted(config.glob("environment*.json")):
        if _load(path, folder).get(_INITIAL_CHECKPOINT_KEY):
            raise JobAdaptationError(
                f"{path.relative_to(folder)}: {_INITIAL_CHECKPOINT_KEY} names the initial checkpoint; set "
                "source_ckpt_file_full_name of the persistor instead"
            )


def _replace_all(texts: dict[Path, tuple[str, str]]) -> None:
    """Replace files; if one fails, all have their old content."""
    staged: dict[Path, str] = {}
    replaced: list[Path] = []
    try:
        for path, (_, new) in texts.items():
            descriptor, staged[path] = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            with open(descriptor, "wb") as file:
                file.write(new.encode())
                file.flush()
                os.fsync(file.fileno())
            shutil.copymode(path, staged[path])
        for path, temporary in staged.items():
            os.replace(temporary, path)
            replaced.append(path)
    except BaseException:
        for path in replaced:
            path.write_bytes(texts[path][0].encode())
        for path, temporary in staged.items():
            if path not in replaced:
                os.unlink(temporary)
        raise
