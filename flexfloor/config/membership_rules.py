"""Rules on elastic membership across groups. PURE."""

from flexfloor.config.checks import require
from flexfloor.config.choices import ReleaseUse
from flexfloor.config.schema import MembershipConfig, MembershipMode, TrainConfig


def check_membership(config: TrainConfig) -> None:
    """Refuse a membership that this cluster and group cannot have; ConfigError names the key and the fix."""
    membership = config.membership
    if membership.mode is MembershipMode.static:
        return
    ep_size, cluster = config.rollout.ep_size, config.cluster
    static = "or choose membership=static"
    require(
        ep_size > 1,
        "membership.mode",
        "elastic",
        "a group of one rank has nobody to release",
        f"set rollout.ep_size to 2 or more, {static}",
    )
    require(
        membership.floor <= ep_size,
        "membership.floor",
        membership.floor,
        f"the group has rollout.ep_size={ep_size} ranks",
        f"set membership.floor to 1 ... {ep_size}",
    )
    _check_member_sets(membership, ep_size)
    require(
        cluster.server_url is None or membership.folder is not None,
        "membership.folder",
        membership.folder,
        "the run attaches to a server and must find its membership manager",
        f"set membership.folder to the --flexfloor-folder of that server, {static}",
    )


def check_release(config: TrainConfig) -> None:
    """Refuse a use of released workers in a group that releases nobody."""
    elastic = config.membership.mode is MembershipMode.elastic
    use = config.release.use
    require(
        elastic or use is ReleaseUse.park,
        "release.use",
        use.value,
        "nobody leaves a static group, so there would never be a worker to use",
        "choose membership=elastic, or release=park",
    )
    url = config.cluster.server_url
    require(
        use is not ReleaseUse.slurm or url is not None,
        "cluster.server_url",
        url,
        "release=slurm gives back whole nodes but the first; a server that the run starts has one node only",
        "start flexfloor-serve on the job's nodes and name it here, or choose release=exit",
    )
    require(
        not config.release.every_step or url is None,
        "release.every_step",
        True,
        "the run did not start this server (cluster.server_url), so it cannot start it anew between steps",
        "leave it out, or leave cluster.server_url out",
    )


def _check_member_sets(membership: MembershipConfig, ep_size: int) -> None:
    key, sets = "membership.member_sets", [sorted(members) for members in membership.member_sets]
    for members in sets:
        require(
            len(set(members)) == len(members) and set(members) <= set(range(ep_size)),
            key,
            members,
            f"not a set of ranks of the group of rollout.ep_size={ep_size}",
            f"name ranks of 0 to {ep_size - 1}, each once",
        )
        require(
            len(members) >= membership.floor,
            key,
            members,
            f"smaller than membership.floor={membership.floor}",
            "leave it out, or lower the floor",
        )
    require(
        all(members not in sets[:index] for index, members in enumerate(sets)),
        key,
        membership.member_sets,
        "a set is named twice",
        "name it once",
    )
