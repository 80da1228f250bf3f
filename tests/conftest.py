"""In which order files are tested, and by which worker; what tests share is in `shared_fixtures.py`."""

import gc

import pytest

gc.disable()  # until all tests are collected
LONGEST = (  # of these only the first needs the build that workers share at once; the longest first
    "test_workflow.py", "test_page.py", "test_compress.py", "test_interrupt.py", "test_kernels_triton.py",
    "test_w4a16_compiled.py", "test_w4a16_gemm.py", "test_engine.py", "test_zeroshot.py", "test_judging.py",
    "test_limited.py", "test_pool.py", "test_bad_input.py", "test_accept.py", "test_engine_sparse.py",
    "test_statistics.py", "test_spinquant.py", "test_q4_k.py", "test_wna16_gemv.py", "test_switching.py",
    "test_package.py", "test_qat.py", "test_baselines.py", "test_coverage.py", "test_bitbybit.py", "test_sanitize.py",
    "test_precision.py", "test_kernels_import.py", "test_w2a2.py", "test_spear.py",
)  # fmt: skip

STORED = ("test_page.py", "test_once.py", "test_content.py", "test_choose.py")  # they show what is accepted


def pytest_configure(config):
    """What tests share takes seconds to import, for which workers would wait: the process that starts them does not."""
    hands_out_tests = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if not hands_out_tests:
        config.pluginmanager.import_plugin("shared_fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes whole files; those that look up what is accepted here are one, so that it is looked up once."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            path = super()._split_scope(nodeid)
            return "stored" if path.endswith(STORED) else path

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    """What is imported and collected stays to the end: garbage is looked for in what tests make, and less often.

    The libraries' million objects, gone through again and again, were an eighth of all processor time.
    """
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def pytest_collection_modifyitems(items):
    """The longest files come first: a worker that got one last would be waited for."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
