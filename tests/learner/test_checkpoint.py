from learner.checkpoint import newest_checkpoint, write_manifest


def test_checkpoint_that_is_not_a_planners_is_passed_over(tmp_path):
    for name, facts in (("v000001", {"step": 1}), ("v000002", {"kind": "prm"})):
        (tmp_path / name).mkdir()
        write_manifest(tmp_path / name, **facts)
    for set_aside in (False, True):
        checkpoint, faults = newest_checkpoint(tmp_path, set_aside=set_aside)
        assert (checkpoint.folder.name, checkpoint.step, len(faults)) == ("v000001", 1, 1)
    assert not (tmp_path / "v000002").exists()
