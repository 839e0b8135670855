from ray_jobs.run.resources import learner_resources, worker_resources

from configs.loading import load_run_config

CUDA = ("rollout.engine.device=cuda", "rollout.engine.adapter_mode=native", "learner.device=cuda")


def test_cpu_run_takes_a_core_for_each_part():
    config = load_run_config(None, [])
    assert worker_resources(config) == {"CPU": 1.0}
    assert learner_resources(config) == [{"CPU": 1.0}]


def test_engine_and_learner_share_a_card():
    config = load_run_config(None, list(CUDA))
    assert worker_resources(config) == {"CPU": 1.0, "GPU": 0.4}
    assert learner_resources(config) == [{"CPU": 1.0, "GPU": 0.4}]


def test_engine_over_several_cards_takes_all_of_them_on_one_machine():
    config = load_run_config(None, [*CUDA, "rollout.engine.tensor_parallel=4"])
    assert worker_resources(config) == {"CPU": 1.0, "GPU": 4.0}


def test_no_two_ranks_share_a_card_and_an_engine_fits_beside_one():
    config = load_run_config(None, [*CUDA, "learner.num_workers=3"])
    ranks = learner_resources(config)
    assert len(ranks) == 3
    assert all(one["GPU"] > 0.5 for one in ranks)
    assert ranks[0]["GPU"] + worker_resources(config)["GPU"] <= 1.0
