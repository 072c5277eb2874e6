from altup.core.hardware import PEAK_BF16 as PEAK_BF16
