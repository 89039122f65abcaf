"""The spectrum of the gradient in a real run, before noise, with noise, and after the filter, as in the paper's figures.

    python -m scripts.experiments.spectrum --picture out/spectrum.png
    python -m scripts.experiments.spectrum --picture out/spectrum.png --learning_rate 0.04 --per_device_train_batch_size 64
    python -m scripts.experiments.spectrum --picture out/spectrum.png recipes/glue/sst2-minilm-lora-eps3.yaml --max_steps 500

Without a recipe the run is a small ViT on digits, and flags change it; `--dimensions` says how much is recorded. What is
drawn and printed needs the gradient before noise, so neither the run nor the picture is private: its ledger says so.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback

from doppler_hf import DopplerTrainer
from doppler_hf.filters import (
    LowPassFilter,
    autocorrelation,
    corrected_noise_gain,
    corrected_output,
    frequency_response,
    noise_gain,
    power_spectral_density,
)
from doppler_hf.reports.plots import FREQUENCY, PICTURE_ENDINGS, new_figure, write
from doppler_hf.run.gradient_recorder import GradientRecorder
from doppler_hf.workloads.arguments import one_line_errors
from doppler_hf.workloads.recipe import parse_recipe

# A small ViT: a spectrum needs more steps than a model.
DIGITS = (
    *("--workload=images", "--dataset_name=digits", "--image_size=8", "--patch_size=4", "--hidden_size=64"),
    *("--num_layers=1", "--num_heads=4", "--target_epsilon=2", "--low_pass_filter=first-order-v1", "--noise_shape=white"),
    *(
        "--learning_rate=1e-2",
        "--per_device_train_batch_size=256",
        "--max_steps=360",
        "--output_dir=out/spectrum",
        "--save_strategy=no",
    ),
    *("--report_to=none", "--disable_tqdm=true", "--logging_steps=60", "--remove_unused_columns=false"),
)
LOW = 0.1  # of Nyquist: a period of twenty steps and more
SETTLED = 1e-3


def trainer_of(argv: Sequence[str], recorder: GradientRecorder) -> DopplerTrainer:
    """Return the trainer of a command line, with a recorder."""
    workload, training_args = parse_recipe(argv)
    trainer = DopplerTrainer(args=training_args, callbacks=[recorder], **workload.for_trainer())
    trainer.remove_callback(PrinterCallback)
    return trainer


def settled_from(low_pass_filter: LowPassFilter, steps: int) -> int:
    """Return the first step from which on the noise gain is within `SETTLED` of the filter's.

    Raises:
        ValueError: If there is none among the steps.
    """
    off = np.abs(corrected_noise_gain(low_pass_filter, steps) / noise_gain(low_pass_filter) - 1) > SETTLED
    first = int(np.flatnonzero(off)[-1]) + 1 if off.any() else 0
    if first >= steps:
        raise ValueError(f"{low_pass_filter} is not settled after {steps} steps. Train for more.")
    return first


def low_share(series: np.ndarray) -> float:
    """Return the share of a series' power that is at frequencies up to `LOW`."""
    # The transform of the autocorrelation, as the paper has it: both signs of a frequency, but one of 0 and Nyquist.
    density = (np.abs(np.fft.rfft(series, n=2 * len(series), axis=0)) ** 2).mean(axis=1)
    density[1:-1] *= 2
    return float(density[np.arange(len(density)) <= LOW * len(series)].sum() / density.sum())


def measure_noise_gain(noise: np.ndarray, filtered: np.ndarray) -> tuple[float, float]:
    """Return the noise gain Σ‖w̃_t‖² / Σ‖w_t‖² of noise, shape (steps, d), after a settled filter, and its standard error.

    With A_i, B_i the sums of coordinate i and r the ratio, the error is √(Σ(A_i - r B_i)² d/(d-1)) / ΣB_i.
    """
    after, before = (np.sum(series**2, axis=0) for series in (filtered, noise))
    gain, dimension = after.sum() / before.sum(), len(before)
    error = np.sqrt(np.sum((after - gain * before) ** 2) * dimension / (dimension - 1)) / before.sum()
    return float(gain), float(error)


def table(recorder: GradientRecorder) -> Table:
    """Return what was measured, in rows. `recorder` must hold the raw gradients."""
    raw, private, filtered = recorder.raw, recorder.private, recorder.filtered
    assert raw is not None
    low_pass_filter, noise = recorder.low_pass_filter, private - raw
    start = settled_from(low_pass_filter, len(private))
    gain, error = measure_noise_gain(noise[start:], corrected_output(low_pass_filter, noise)[start:])
    signal, signal_after = np.mean(raw**2), np.mean(corrected_output(low_pass_filter, raw)[start:] ** 2)
    _, density = power_spectral_density(raw)
    edge = max(1, len(density) // 20)
    rows = (
        ("noise gain measured", f"{gain:.5f} ± {error:.5f}"),
        ("noise gain of the filter, Σκ²", f"{noise_gain(low_pass_filter):.5f}"),
        ("noise per number recorded, measured / known", f"{noise.std() / recorder.noise_std:.4f}"),
        ("signal per noise before the filter", f"{signal / recorder.noise_std**2:.4g}"),
        ("signal per noise after it", f"{signal_after / (gain * recorder.noise_std**2):.4g}"),
        ("power of the gradient that the filter keeps", f"{signal_after / np.mean(raw[start:] ** 2):.1%}"),
        (f"power at frequencies up to {LOW:g}: before noise", f"{low_share(raw):.1%}"),
        ("with noise", f"{low_share(private):.1%}"),
        ("filtered", f"{low_share(filtered):.1%}"),
        ("PSD before noise at the lowest / highest frequencies", f"{density[:edge].mean() / density[-edge:].mean():.3g}"),
        ("autocorrelation before noise at lag 1, 10, 100", correlations(raw, lags=(1, 10, 100))),
    )
    result = Table(title=f"{len(private)} steps, {recorder.dimensions} dimensions, {low_pass_filter}", show_header=False)
    for row in rows:
        result.add_row(*row)
    return result


def correlations(series: np.ndarray, *, lags: Sequence[int]) -> str:
    """Return the autocorrelation at those of the lags that the series has, in units of that at 0, as text."""
    values = autocorrelation(series)
    return ", ".join(f"{values[lag] / values[0]:.3f}" for lag in lags if lag < len(values))


def draw(recorder: GradientRecorder, picture: str, *, title: str) -> None:
    """Draw autocorrelation and spectrum of the recordings, and the spectrum of white noise after the filter."""
    raw = recorder.raw
    assert raw is not None
    series = {"clipped gradient, before noise": raw, "private gradient": recorder.private, "filtered": recorder.filtered}
    max_lag = min(100, len(raw) - 1)
    spectra = {}
    for label, values in series.items():
        frequencies, density = power_spectral_density(values)
        spectra[label] = (frequencies, density / recorder.noise_std**2)
    gain = np.abs(frequency_response(recorder.low_pass_filter, frequencies)) ** 2
    # Nothing is drawn below the range of what was measured: a filter's zeros are at minus infinity.
    lowest = min(density.min() for _, density in spectra.values()) / 2
    spectra["noise after the filter, |H|²"] = (frequencies, np.maximum(gain, lowest))
    plot_spectra(
        {label: autocorrelation(values)[: max_lag + 1] for label, values in series.items()}, spectra, picture, title=title
    )


def plot_spectra(
    autocorrelations: Mapping[str, np.ndarray],
    spectra: Mapping[str, tuple[np.ndarray, np.ndarray]],
    path: str | Path,
    *,
    title: str,
) -> None:
    """Draw the paper's figures of gradients in time and frequency: autocorrelation, and power spectral density.

    Autocorrelations, label → values from lag 0 on, are drawn in units of the first; spectra are frequencies as fractions of
    Nyquist and densities in units of the noise's. One without an autocorrelation is dashed.
    """
    figure = new_figure(11.0, 4.6)
    time, frequency = figure.subplots(1, 2)
    colours = {label: f"C{index}" for index, label in enumerate(autocorrelations)}
    for label, values in autocorrelations.items():
        time.plot(values / values[0], color=colours[label], label=label)
    for label, (frequencies, density) in spectra.items():
        style = "-" if label in colours else "--"
        frequency.semilogy(frequencies, density, style, color=colours.get(label, "black"), linewidth=1.2, label=label)
    time.axhline(0, color="black", linewidth=0.6)
    time.set(xlabel="lag τ (steps)", ylabel="autocorrelation φ_τ / φ_0", title="time")
    frequency.set(xlabel=FREQUENCY, ylabel="PSD in units of the noise's", title="frequency")
    for axes in (time, frequency):
        axes.legend(fontsize="small")
    figure.suptitle(title)
    write(figure, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print the table, draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--picture", required=True, help=f"Where to draw; ends in one of {', '.join(PICTURE_ENDINGS)}.")
    parser.add_argument("--dimensions", type=int, default=256, help="How many numbers are recorded of each gradient.")
    parser.add_argument("--recording", help="An .npz file for what was recorded; by default it is not kept.")
    own, flags = parser.parse_known_args(argv)
    has_recipe = bool(flags) and not flags[0].startswith("-")
    with one_line_errors():
        if not own.picture.endswith(PICTURE_ENDINGS):
            raise ValueError(f"--picture must end in one of {', '.join(PICTURE_ENDINGS)}, got {own.picture!r}.")
        recorder = GradientRecorder(dimensions=own.dimensions, record_raw=True)
        trainer = trainer_of(flags if has_recipe else [*DIGITS, *flags], recorder)
    trainer.train()
    if own.recording is not None:
        recorder.save(own.recording)
    Console().print(table(recorder))
    args = trainer.args
    size = trainer.private_run.statement.expected_batch_size
    steps, low_pass_filter = len(recorder.private), recorder.low_pass_filter
    title = f"learning rate {args.learning_rate:g}, batch size {size}, {steps} steps, {low_pass_filter}"
    draw(recorder, own.picture, title=title)
    print(f"Picture: {own.picture}. Not private: it shows the gradient without noise.")


if __name__ == "__main__":
    main()
