"""Watchdogs as others write them: the first is right, and the rest are not."""

import math
import statistics


class MedianWatchdog:
    """Flags NaN at once, and losses above the median and 10 median deviations that stay."""

    def __init__(self, config):
        self.config = config
        self.losses = []
        self.num_high = 0

    def limit(self):
        median = statistics.median(self.losses)
        return median + 10 * statistics.median(abs(loss - median) for loss in self.losses)

    def observe(self, step, loss):
        if not math.isfinite(loss):
            return True
        if len(self.losses) < 16 or loss <= self.limit():
            self.losses = [*self.losses, loss][-self.config.window :]
            self.num_high = 0
            return False
        self.num_high += 1
        return self.num_high >= self.config.patience


class Impatient(MedianWatchdog):
    def observe(self, step, loss):
        return super().observe(step, loss) or self.num_high > 0


class MeanOfAll(MedianWatchdog):
    """Has the spike itself in the baseline."""

    def observe(self, step, loss):
        if not math.isfinite(loss):
            return True
        self.losses.append(loss)
        limit = statistics.fmean(self.losses) + 4 * statistics.pstdev(self.losses)
        self.num_high = self.num_high + 1 if loss > limit else 0
        return self.num_high >= self.config.patience


class DeafToNaN(MedianWatchdog):
    def observe(self, step, loss):
        return math.isfinite(loss) and super().observe(step, loss)


class Silent(MedianWatchdog):
    def observe(self, step, loss):
        return None


class DeafToInfinity(MedianWatchdog):
    def observe(self, step, loss):
        return loss != float("inf") and super().observe(step, loss)
