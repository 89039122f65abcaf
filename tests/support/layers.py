"""Each kind of layer that has a rule, with an input."""

import torch
from torch import nn
from transformers import BitConfig
from transformers.models.bit.modeling_bit import BitGroupNormActivation, WeightStandardizedConv2d

from tests.support.nets import BATCH, Net, draw, tokens


def after_linear(layer, *, features=4):
    """The layer in the middle, so that the gradient of its input matters too."""
    return nn.Sequential(nn.Linear(3, features), layer, nn.Tanh())


IMAGE = draw(BATCH, 4, 9, 8)
LAYERS = {
    "linear": (nn.Linear(3, 4), draw(BATCH, 3)),
    "linear on tokens": (after_linear(nn.Linear(4, 5)), draw(BATCH, 6, 3)),
    "linear on a grid": (after_linear(nn.Linear(4, 5, bias=False)), draw(BATCH, 2, 3, 3)),
    "embedding": (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4)), tokens(BATCH, 6)),
    "embedding of one index": (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4)), tokens(BATCH)),
    "embedding of a grid": (nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4)), tokens(BATCH, 2, 3)),
    "embedding with padding": (nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Linear(3, 4)), tokens(BATCH, 6)),
    "layer norm": (after_linear(nn.LayerNorm(4)), draw(BATCH, 6, 3)),
    "layer norm of one vector": (after_linear(nn.LayerNorm(4)), draw(BATCH, 3)),
    "layer norm without bias": (after_linear(nn.LayerNorm(4, bias=False)), draw(BATCH, 6, 3)),
    "layer norm without affine": (after_linear(nn.LayerNorm(4, elementwise_affine=False)), draw(BATCH, 6, 3)),
    "layer norm over two axes": (after_linear(nn.LayerNorm((6, 4))), draw(BATCH, 6, 3)),
    "layer norm, large epsilon": (after_linear(nn.LayerNorm(4, eps=0.3)), draw(BATCH, 6, 3)),
    "rms norm": (after_linear(nn.RMSNorm(4)), draw(BATCH, 6, 3)),
    "rms norm, large epsilon": (after_linear(nn.RMSNorm(4, eps=0.3)), draw(BATCH, 6, 3)),
    "group norm": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(3, 6), nn.Tanh()), IMAGE),
    "group norm of tokens": (nn.Sequential(nn.Conv1d(4, 6, 1), nn.GroupNorm(2, 6, eps=0.3)), draw(BATCH, 4, 7)),
    "instance norm": (nn.Sequential(nn.Conv2d(4, 6, 1), nn.InstanceNorm2d(6, affine=True)), IMAGE),
    "convolution": (nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Conv2d(6, 2, 2)), IMAGE),
    "convolution without bias": (nn.Conv2d(4, 6, (3, 2), bias=False), IMAGE),
    "stride and padding": (nn.Conv2d(4, 6, 3, stride=(2, 3), padding=(1, 2)), IMAGE),
    "stride that leaves a rest": (nn.Conv2d(4, 6, 4, stride=3), IMAGE),
    "dilation": (nn.Conv2d(4, 6, (3, 2), dilation=(2, 3), padding=2), IMAGE),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, stride=2, padding=1), IMAGE),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, padding=1), IMAGE),
    "depthwise with a multiplier": (nn.Conv2d(4, 8, 3, groups=4, dilation=2, bias=False), IMAGE),
    "padding 'same'": (nn.Conv2d(4, 6, (3, 5), padding="same", dilation=2), IMAGE),
    "padding 'valid'": (nn.Conv2d(4, 6, 3, padding="valid"), IMAGE),
    "patches": (nn.Conv2d(4, 6, 4, stride=4), IMAGE),
    "convolution in one dimension": (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), draw(BATCH, 4, 9)),
    "dilation in one dimension": (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, bias=False), draw(BATCH, 4, 9)),
    "convolution in three dimensions": (nn.Conv3d(2, 4, 2, stride=2, padding=1), draw(BATCH, 2, 4, 5, 3)),
    "groups in three dimensions": (
        nn.Conv3d(4, 6, (2, 1, 3), stride=(1, 2, 1), padding=(0, 1, 2), groups=2),
        draw(BATCH, 4, 4, 5, 3),
    ),
    "dilation in three dimensions": (nn.Conv3d(2, 4, 2, padding=1, dilation=(1, 2, 3)), draw(BATCH, 2, 4, 5, 6)),
    "stride, dilation and padding in three dimensions": (
        nn.Conv3d(2, 4, (2, 3, 1), stride=(2, 1, 3), padding=(1, 2, 0), dilation=(2, 1, 1)),
        draw(BATCH, 2, 4, 5, 6),
    ),
    "stride beyond the kernel": (nn.Conv2d(4, 6, 2, stride=(3, 4), padding=1), IMAGE),
    "group norm and activation": (
        nn.Sequential(
            nn.Conv2d(4, 6, 1), BitGroupNormActivation(BitConfig(num_groups=3, hidden_act="gelu"), 6), nn.Conv2d(6, 2, 1)
        ),
        IMAGE,
    ),
    "standardized convolution": (
        nn.Sequential(
            WeightStandardizedConv2d(4, 6, 3, padding="same"),
            nn.Tanh(),
            WeightStandardizedConv2d(6, 2, 2, stride=2, eps=0.3),
        ),
        IMAGE,
    ),
    "standardized convolution with bias, stride and dilation": (
        WeightStandardizedConv2d(4, 6, 3, stride=3, padding="valid", dilation=2, bias=True),
        IMAGE,
    ),
    "standardized convolution with groups": (WeightStandardizedConv2d(4, 6, 3, groups=2, stride=2, padding="same"), IMAGE),
    "standardized convolution, twice": (
        Net(lambda n, x: n.conv(n.conv(x).tanh()).tanh(), conv=WeightStandardizedConv2d(4, 4, 3, padding="same")),
        IMAGE,
    ),
    "one position": (nn.Conv2d(4, 6, (9, 8)), IMAGE),
    "channels last in memory": (
        nn.Conv2d(4, 6, (3, 2), stride=(1, 2), dilation=(2, 1)).to(memory_format=torch.channels_last),
        IMAGE.contiguous(memory_format=torch.channels_last),
    ),
    "every second row of the input": (
        Net(lambda n, x: n.conv(x[:, :, ::2, 1:]), conv=nn.Conv2d(4, 6, 2, padding=(0, 1))),
        IMAGE,
    ),
    "the same channel again and again": (
        Net(lambda n, x: n.conv(x[:, :1].expand(-1, 3, -1, -1)), conv=nn.Conv2d(3, 6, 2)),
        IMAGE,
    ),
}
