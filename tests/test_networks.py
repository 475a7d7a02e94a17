"""What a node has beside TCP, read from a tree like /sys/class."""

from taccl.runtime.networks import direct


def test_devices_are_named_with_what_they_speak(tmp_path):
    for name in ("infiniband/mlx5_1", "infiniband/mlx5_0", "cxi/cxi0", "net/eth0"):
        (tmp_path / name).mkdir(parents=True)
    assert direct(tmp_path) == "mlx5_0 (RDMA), mlx5_1 (RDMA), cxi0 (Slingshot)"


def test_a_node_without_such_devices_has_none(tmp_path):
    (tmp_path / "infiniband").mkdir()  # the module is loaded, and there is no device
    assert direct(tmp_path) == "" and direct(tmp_path / "nothing") == ""
