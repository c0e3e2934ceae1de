"""What a sample's sandboxes are made from: `sandbox=("dsec", "dsec.yaml")`, or a `DSecSandboxConfig` of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsec import DSecContainerRunArgs

_HOUR_S = 3600.0


class DSecSandbox(BaseModel):
    """One sandbox. The fields that DSecContainerRunArgs has too mean the same there; workdir is made if it is not there.

    create_timeout: seconds from the request until it is ready, waiting for room included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    container_image: str = "debian@12"
    layers: tuple[str, ...] = ()
    cpu_cores_limit: float = 1
    memory_limit_mb: int = 1024
    disk_limit_mb: int = 4096
    pids_limit: int = 512
    network_rules: dict[str, bool] = {}
    init_user: str = "root"
    workdir: str = Field(default="/workspace", pattern="^/[^\0]*$")
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    qos: Literal["best_effort", "latency_sensitive"] = "best_effort"
    # An evaluation that was killed cleans nothing up; until then a sample may wait long for its model.
    ttl_running_stop: float | None = Field(default=4 * _HOUR_S, gt=0)
    ttl_total: float | None = Field(default=None, gt=0)
    create_timeout: float = Field(default=600, gt=0, le=86_400)

    def __hash__(self) -> int:  # Inspect keeps configurations in sets
        return hash(self.model_dump_json())

    def run_args(self, labels: dict[str, str]) -> DSecContainerRunArgs:
        fields = self.model_dump(exclude={"create_timeout", "sandboxes", "labels"})
        return DSecContainerRunArgs(**fields, labels={**self.labels, **labels})


class DSecSandboxConfig(DSecSandbox):
    """The sandboxes of a sample by name, the first of them the default; what one of them leaves out is as said above it.

    Without `sandboxes` there is one, called "default".
    """

    sandboxes: dict[str, DSecSandbox] = {}

    __hash__ = DSecSandbox.__hash__

    def by_name(self) -> dict[str, DSecSandbox]:
        shared = self.model_dump(exclude={"sandboxes"}, exclude_unset=True)
        if not self.sandboxes:
            return {"default": DSecSandbox(**shared)}
        return {
            name: DSecSandbox(**{**shared, **own.model_dump(exclude_unset=True)})
            for name, own in self.sandboxes.items()
        }


def load(config: BaseModel | str | None) -> DSecSandboxConfig:
    """The configuration of a task or sample. ValueError says what is wrong with it, and in which file."""
    if config is None:
        return DSecSandboxConfig()
    if isinstance(config, DSecSandboxConfig):
        return config
    if isinstance(config, DSecSandbox):
        return DSecSandboxConfig(**config.model_dump(exclude_unset=True))
    if isinstance(config, BaseModel):
        raise ValueError(
            f"sandbox 'dsec' takes a DSecSandboxConfig or a YAML file of its fields, no {type(config).__name__}"
        )
    try:
        found = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{config}: {error}") from error
    return parse({} if found is None else found, config)


def parse(found: Any, where: str = "sandbox configuration") -> DSecSandboxConfig:  # noqa: ANN401 - what YAML has
    try:
        return DSecSandboxConfig.model_validate(found)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{where}: {wrong}") from error
