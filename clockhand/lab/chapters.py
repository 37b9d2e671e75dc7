"""The sections of both chapters, in their order: the spine of the report.

A reader of a chapter finds every section here, the claims it makes, the figures that show it, and where the code is.
Claims name their section themselves; this file has the titles and a word on sections that claim nothing.
"""

from dataclasses import dataclass, field

from clockhand.lab.claim import Text


@dataclass(frozen=True)
class Section:
    """One heading of a chapter."""

    number: str
    title: Text
    figures: tuple[str, ...] = ()
    """Names of figures that belong here, see `figures.py`."""
    note: Text = field(default=Text("", ""))
    """What is worth saying where there is nothing to measure."""
    read: str = ""
    """Where the code is."""

    @property
    def depth(self) -> int:
        return self.number.count(".")


CHAPTERS: dict[str, Text] = {
    "A": Text("Mini-LLaMA-0.04B: the architecture from scratch", "Mini-LLaMA-0.04B：从零实现现代 Transformer 架构"),
    "B": Text("MiniMind-3: the Transformer from zero", "MiniMind-3：Transformer 架构从零搭建"),
}

SECTIONS: dict[str, tuple[Section, ...]] = {
    "A": (
        Section("2.2", Text("RMSNorm, the automatic volume balancer", "RMSNorm：自动音量平衡器")),
        Section("2.2.1", Text("Why deep networks must be normalised", "为什么深层网络必须归一化")),
        Section(
            "2.2.2",
            Text("RMSNorm and LayerNorm: leaving out the mean", "RMSNorm 与 LayerNorm：去掉多余的均值"),
            ("scale_invariance",),
        ),
        Section("2.2.3", Text("A walkthrough by hand", "手算一遍")),
        Section("2.2.4", Text("RMSNorm line by line", "RMSNorm 逐行实现"), read="clockhand/model/norm.py:RMSNorm"),
        Section("2.3", Text("RoPE, the clock hand method", "RoPE 旋转位置编码：时钟指针法"), ("clock",)),
        Section("2.3.1", Text("Why a model needs positions", "为什么模型需要位置感知")),
        Section("2.3.2", Text("The flaw of absolute positions", "绝对位置编码的致命缺陷")),
        Section(
            "2.3.3",
            Text("Relative distance by turning hands", "用旋转角表达相对距离"),
            ("wavelengths", "score_distance"),
        ),
        Section(
            "2.3.4", Text("The operator rotate_half", "核心算子 rotate_half"), read="clockhand/model/rope.py:rotate"
        ),
        Section("2.4", Text("SwiGLU, the private study", "SwiGLU 门控前馈网络：私人书房")),
        Section("2.4.1", Text("Seminars and private study", "讨论会与独自钻研"), ("treemap",)),
        Section("2.4.2", Text("From the plain MLP to SwiGLU", "从传统前馈网络到 SwiGLU"), ("activations",)),
        Section("2.4.3", Text("SwiGLU line by line", "SwiGLU 逐行实现"), read="clockhand/model/mlp.py:SwiGLU"),
        Section("2.5", Text("GQA, the detective bureau", "GQA 分组查询注意力：侦探社")),
        Section("2.5.1", Text("What Q, K and V are, and why √d", "Q、K、V 是什么，为何除以 √d"), ("saturation",)),
        Section("2.5.2", Text("The causal mask as a limit", "因果掩码的数学极限"), ("mask",)),
        Section("2.5.3", Text("Why GQA", "为什么需要 GQA"), ("kv_memory", "gqa")),
        Section(
            "2.5.4", Text("Attention line by line", "注意力逐行实现"), read="clockhand/model/attention.py:Attention"
        ),
        Section("2.6", Text("Two crowning touches", "两处点睛之笔")),
        Section("2.6.1", Text("Residual connections, the express elevator", "残差连接：直达电梯"), ("gradients",)),
        Section("2.6.2", Text("Weight tying, the mirror pact", "权重绑定：镜像之约")),
        Section("2.7", Text("Final assembly", "最终组装")),
        Section(
            "2.7.1",
            Text("One block", "单层 TransformerBlock"),
            note=Text(
                "Nothing to measure that the parts do not show: a norm, a part, a sum, twice.",
                "各部件之外没有更多可测的：归一化、部件、相加，重复两次。",
            ),
            read="clockhand/model/transformer.py:Block",
        ),
        Section("2.7.2", Text("The whole language model and its loss", "完整的因果语言模型与损失")),
        Section("2.8", Text("Summary and hands-on lab", "小结与动手实验"), read="tests/test_model.py"),
    ),
    "B": (
        Section("3.1", Text("Overview of the architecture", "Transformer 架构总览")),
        Section(
            "3.1.1",
            Text("Decoder-only and encoder-decoder", "Decoder-Only vs Encoder-Decoder"),
            note=Text(
                "That a token sees only itself and what came before is measured in A18 and B10.",
                "“每个 token 只看自己和之前的内容”，由 A18 与 B10 测量。",
            ),
            read="clockhand/model/attend.py:Visibility",
        ),
        Section(
            "3.1.2",
            Text("The MiniMind-3 architecture in full", "MiniMind-3 完整架构图"),
            read="clockhand/model/transformer.py",
        ),
        Section("3.2", Text("The embedding", "嵌入层（Embedding）")),
        Section("3.2.1", Text("Token embedding", "Token Embedding"), read="clockhand/model/transformer.py:Transformer"),
        Section("3.2.2", Text("Its parameters", "参数量计算")),
        Section("3.2.3", Text("Weight tying", "权重共享（Weight Tying）")),
        Section("3.3", Text("Rotary positions", "位置编码：RoPE")),
        Section("3.3.1", Text("Why positions", "为什么需要位置编码？")),
        Section(
            "3.3.2",
            Text("Limits of earlier encodings", "传统位置编码的局限"),
            note=Text("What a learned table cannot do is measured in A07.", "学习式位置表做不到什么，见 A07。"),
        ),
        Section(
            "3.3.3",
            Text("The idea of RoPE", "RoPE 核心思想"),
            note=Text("Turn the clock above: it is this sentence.", "拨动上面的时钟：它就是这句话。"),
            read="clockhand/model/rope.py:rotation",
        ),
        Section("3.3.4", Text("Its derivation", "RoPE 数学推导")),
        Section("3.3.5", Text("RoPE in code", "RoPE 代码实现"), read="clockhand/model/rope.py:rotate"),
        Section("3.3.6", Text("Longer contexts: YaRN", "RoPE 长度外推：YaRN"), ("yarn", "lengths")),
        Section("3.4", Text("Normalisation: RMSNorm", "归一化：RMSNorm")),
        Section(
            "3.4.1",
            Text("From LayerNorm to RMSNorm", "从 LayerNorm 到 RMSNorm"),
            note=Text("Whether the mean is missed is measured in A05.", "去掉均值有没有损失，见 A05。"),
        ),
        Section(
            "3.4.2",
            Text("RMSNorm defined", "RMSNorm 数学定义"),
            note=Text("Checked in A02 and A03.", "由 A02、A03 检验。"),
        ),
        Section("3.4.3", Text("RMSNorm in code", "RMSNorm 代码实现"), read="clockhand/model/norm.py:RMSNorm"),
        Section("3.4.4", Text("Pre-norm and post-norm", "Pre-Norm vs Post-Norm"), ("norm_position",)),
        Section("3.5", Text("Grouped-query attention", "注意力机制：GQA")),
        Section(
            "3.5.1",
            Text("Attention again", "注意力机制回顾"),
            note=Text("The √d under the scores is measured in A16 and A17.", "分数下面的 √d，见 A16 与 A17。"),
            read="clockhand/model/attend.py:attend_reference",
        ),
        Section(
            "3.5.2",
            Text("From MHA to GQA", "从 MHA 到 GQA 的演进"),
            note=Text("Memory in A19, quality and speed in A27.", "内存见 A19，质量与速度见 A27。"),
        ),
        Section("3.5.3", Text("GQA in MiniMind-3", "MiniMind-3 的 GQA 配置")),
        Section("3.5.4", Text("GQA in code", "GQA 代码实现"), read="clockhand/model/attention.py:Attention"),
        Section("3.5.5", Text("The causal mask", "因果掩码（Causal Mask）")),
        Section("3.6", Text("The MLP: SwiGLU", "前馈网络：SwiGLU")),
        Section(
            "3.6.1",
            Text("From ReLU to SwiGLU", "从 ReLU 到 SwiGLU 的演进"),
            note=Text(
                "Dead units in A14, the three curves in chapter A, 2.4.2.", "死亡单元见 A14，三条曲线见 A 章 2.4.2。"
            ),
        ),
        Section(
            "3.6.2",
            Text("SwiGLU defined", "SwiGLU 数学定义"),
            note=Text("Its gate is measured in A12 and A13.", "它的门由 A12、A13 测量。"),
        ),
        Section(
            "3.6.3",
            Text("SwiGLU by intuition", "SwiGLU 直觉理解"),
            note=Text("A gate, but no valve between 0 and 1: A13.", "是门，但不是 0 到 1 的阀：A13。"),
        ),
        Section("3.6.4", Text("SwiGLU in code", "SwiGLU 代码实现"), read="clockhand/model/mlp.py:SwiGLU"),
        Section("3.6.5", Text("Its parameters", "参数量分析"), ("gate_value",)),
        Section("3.7", Text("The block assembled", "Transformer Block 组装")),
        Section(
            "3.7.1",
            Text("The whole block", "完整 Block 结构"),
            note=Text("Built and measured in B17.", "由 B17 构建并测量。"),
        ),
        Section("3.7.2", Text("The block in code", "代码实现"), read="clockhand/model/transformer.py:Block"),
        Section("3.8", Text("Mixture of experts", "MoE（Mixture of Experts）")),
        Section(
            "3.8.1",
            Text("The idea", "MoE 核心思想"),
            note=Text("That only the chosen experts compute is timed in B16.", "“只计算被选中的专家”，由 B16 计时。"),
        ),
        Section("3.8.2", Text("MoE in MiniMind-3", "MiniMind-3 MoE 配置"), read="clockhand/presets.py:PRESETS"),
        Section("3.8.3", Text("The router", "Router 机制"), ("router",), read="clockhand/model/moe.py:route"),
        Section("3.8.4", Text("Top-k routing", "Top-K 路由"), ("experts_text",)),
        Section("3.8.5", Text("MoE and dense parameters", "MoE vs Dense 参数对比"), ("waterfall",)),
        Section("3.9", Text("The whole model class", "MiniMind 完整模型类")),
        Section("3.9.1", Text("ModelArgs", "ModelArgs 配置"), read="clockhand/course.py:ModelArgs"),
        Section("3.9.2", Text("MiniMindModel", "MiniMindModel 代码结构"), read="clockhand/course.py:MiniMindModel"),
        Section("3.10", Text("All parameters", "参数量完整计算")),
        Section(
            "3.10.1",
            Text("The dense model, part by part", "MiniMind-3 Dense 参数分解"),
            note=Text(
                "The waterfall in 3.8.5 goes from 75.7M to 63.9M to 198.4M; the tables are in B19.",
                "3.8.5 的瀑布图从 75.7M 走到 63.9M 再到 198.4M；明细表见 B19。",
            ),
        ),
        Section("tasks", Text("Exercises and challenges", "实践任务与挑战"), read="clockhand/lab/exercises.py"),
    ),
}
