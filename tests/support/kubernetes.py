"""Schemas of the manifests in ``examples/cluster``: the fields of each kind's public API that those may use.

Invariant: a field that the API does not have, or of another type, is refused. The types are those of
Kubernetes' core/v1, KubeRay's ray.io/v1 and LeaderWorkerSet's leaderworkerset.x-k8s.io/v1, by their names.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import UNSET, Meta, UnsetType

Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Quantity = Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$")]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Path_ = Annotated[str, Meta(pattern="^/")]


class Part(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class ObjectMeta(Part):
    name: Name | UnsetType = UNSET
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class ExecAction(Part):
    command: Annotated[list[str], Meta(min_length=1)]


class HTTPGetAction(Part):
    path: Path_
    port: Name | Port


class Probe(Part):
    exec: ExecAction | UnsetType = UNSET
    http_get: HTTPGetAction | UnsetType = UNSET
    initial_delay_seconds: Count = 0
    period_seconds: Seconds = 10
    timeout_seconds: Seconds = 1
    failure_threshold: Seconds = 3

    def __post_init__(self) -> None:
        if (self.exec is UNSET) == (self.http_get is UNSET):
            raise ValueError("a probe needs one of exec and httpGet")


class SecretKeySelector(Part):
    name: Name
    key: str


class EnvVarSource(Part):
    secret_key_ref: SecretKeySelector


class EnvVar(Part):
    name: str
    value: str | UnsetType = UNSET
    value_from: EnvVarSource | UnsetType = UNSET


class ContainerPort(Part):
    name: Name
    container_port: Port


class ResourceRequirements(Part):
    limits: dict[str, Quantity] = {}
    requests: dict[str, Quantity] = {}


class Capabilities(Part):
    drop: list[str] = []


class SecurityContext(Part):
    allow_privilege_escalation: bool = True
    read_only_root_filesystem: bool = False
    capabilities: Capabilities | UnsetType = UNSET


class VolumeMount(Part):
    name: Name
    mount_path: Path_
    read_only: bool = False


class Container(Part, kw_only=True):
    name: Name
    image: str
    command: list[str] = []
    args: list[str] = []
    env: list[EnvVar] = []
    ports: list[ContainerPort] = []
    startup_probe: Probe | UnsetType = UNSET
    readiness_probe: Probe | UnsetType = UNSET
    liveness_probe: Probe | UnsetType = UNSET
    resources: ResourceRequirements
    security_context: SecurityContext | UnsetType = UNSET
    volume_mounts: list[VolumeMount] = []

    @property
    def probes(self) -> list[Probe]:
        probes = (self.startup_probe, self.readiness_probe, self.liveness_probe)
        return [probe for probe in probes if isinstance(probe, Probe)]


class PersistentVolumeClaimSource(Part):
    claim_name: Name
    read_only: bool = False


class EmptyDir(Part):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | UnsetType = UNSET


class Volume(Part):
    name: Name
    persistent_volume_claim: PersistentVolumeClaimSource | UnsetType = UNSET
    empty_dir: EmptyDir | UnsetType = UNSET


class PodSecurityContext(Part):
    run_as_non_root: bool
    run_as_user: Count
    run_as_group: Count
    fs_group: Count


class PodSpec(Part):
    containers: Annotated[list[Container], Meta(min_length=1)]
    volumes: list[Volume] = []
    security_context: PodSecurityContext | UnsetType = UNSET

    def __post_init__(self) -> None:
        names = {volume.name for volume in self.volumes}
        for container in self.containers:
            if missing := {mount.name for mount in container.volume_mounts} - names:
                raise ValueError(f"{container.name} mounts no volume of its pod: {sorted(missing)}")


class PodTemplate(Part, kw_only=True):
    metadata: ObjectMeta | UnsetType = UNSET
    spec: PodSpec


class HeadGroup(Part):
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(Part, kw_only=True):
    group_name: str
    replicas: Count
    min_replicas: Count
    max_replicas: Count
    num_of_hosts: Seconds = 1
    ray_start_params: dict[str, str]
    template: PodTemplate

    def __post_init__(self) -> None:
        if not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError("replicas must be from minReplicas to maxReplicas")


class RayClusterSpec(Part, kw_only=True):
    ray_version: str
    enable_in_tree_autoscaling: bool = False
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayJobSpec(Part, kw_only=True):
    entrypoint: str
    shutdown_after_job_finishes: bool = False
    ttl_seconds_after_finished: Count = 0
    submission_mode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"] = "K8sJobMode"
    ray_cluster_spec: RayClusterSpec


class RayJob(Part):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: ObjectMeta
    spec: RayJobSpec


class LeaderWorkerTemplate(Part, kw_only=True):
    size: Seconds = 1
    restart_policy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
    leader_template: PodTemplate
    worker_template: PodTemplate


class LeaderWorkerSetSpec(Part, kw_only=True):
    replicas: Count = 1
    startup_policy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"
    leader_worker_template: LeaderWorkerTemplate


class LeaderWorkerSet(Part):
    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: ObjectMeta
    spec: LeaderWorkerSetSpec


class ServicePort(Part):
    name: Name
    port: Port
    target_port: Name | Port


class ServiceSpec(Part):
    selector: dict[str, str]
    ports: list[ServicePort]


class Service(Part):
    api_version: Literal["v1"]
    kind: Literal["Service"]
    metadata: ObjectMeta
    spec: ServiceSpec


KINDS: dict[str, Any] = {each.__name__: each for each in (RayJob, LeaderWorkerSet, Service)}


def read(path: Path) -> list[Any]:
    """Return the checked objects of a manifest. Raises msgspec.ValidationError."""
    found = yaml.safe_load_all(path.read_text())
    return [msgspec.convert(each, KINDS[each["kind"]]) for each in found]
