"""A device with streams, graphs and a clock of its own, for tests of the timer without a GPU."""

import time


class Fake:
    """A device with streams, graphs and a clock. What is launched while a graph is captured runs at its replay.

    As on CUDA, the outputs of a captured launch are fixed memory, and work on another stream runs at once and is not
    part of the graph. Reading a weight that is not in the cache of `l2` bytes costs more.
    """

    enough = 1.0  # never reached: graphs have as many launches as allowed
    most = 8

    def __init__(self, l2=0):
        self.l2, self.capturing, self.clock, self.cache, self.noise = l2, None, 0.0, [], iter(())

    def run(self, work, cost=1e-6, side=False):
        if self.capturing is not None and not side:
            self.capturing.append((work, cost))
        else:
            work()

    def capture(self, calls):
        self.capturing = None
        calls[0]()
        self.capturing = []
        outputs = [call() for call in calls]
        work, self.capturing = self.capturing, None
        return Replay(self, work, outputs)

    def read(self, weight):
        """Seconds to read a weight, by least recently used."""
        hit = weight.data_ptr() in self.cache
        self.cache = [p for p in self.cache if p != weight.data_ptr()] + [weight.data_ptr()]
        while len(self.cache) * weight.nbytes > self.l2 and self.cache:
            self.cache.pop(0)
        return 1e-6 if hit else 4e-6

    def state(self, graph):
        return {"clock_mhz": 1980, "throttle": "none"}

    def release(self):
        pass

    def joules(self, graphs, seconds):
        return [8e-6] * len(graphs)

    def host_us(self, *calls):
        for call in calls:
            call()
        return [12.5] * len(calls)


class Replay:
    def __init__(self, fake, work, outputs):
        self.fake, self.work, self.outputs = fake, work, outputs

    def replay(self):
        seconds = 0.0
        for work, cost in self.work:
            work()
            seconds += cost() if callable(cost) else cost
        return seconds * (1 + next(self.fake.noise, 0.0))


class Host:
    """The processor's clock around plain calls: what a provider does on small inputs, without a GPU."""

    l2 = 0  # one copy: what is timed here is arithmetic, not memory
    enough = 0.0
    most = 1

    def capture(self, calls):
        return HostCalls(calls)

    def state(self, graph):
        return {}


class HostCalls:
    def __init__(self, calls):
        self.calls = calls
        self.outputs = [call() for call in calls]

    def replay(self):
        start = time.perf_counter()
        self.outputs = [call() for call in self.calls]
        return time.perf_counter() - start
