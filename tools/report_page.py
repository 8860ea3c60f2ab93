"""The report's frame: page, style sheet, and a sentence for each number of summary.json.
Given nothing; `PAGE` takes title, name and body, all of them escaped already.
Returns texts only: no script, no font and no picture from elsewhere.
"""

SENTENCES = {
    "steps": "Steps: one batch of rollouts and its update each.",
    "reward_before": "Mean reward of the initial policy's texts on the held-out prompts.",
    "reward_after": "The same for the final policy, same prompts and sampling seeds.",
    "reward_gain_ci95": "95 % interval of the reward's gain: paired bootstrap over the prompts.",
    "gold_before": "Mean gold score of the initial policy's texts; PPO never sees it.",
    "gold_after": "The same for the final policy.",
    "gold_ci95": "95 % interval of the gold gain: paired bootstrap over the prompts.",
    "top_word": "The rated word that contributed most to the gold gain.",
    "gold_gain_without_top_word_ci95": "The gain's 95 % interval when that word is taken out of the lexicon.",
    "kl_final": "KL from the initial to the final policy, nats per sequence, on the held-out prompts.",
    "distinct2_before": "Distinct bigrams of words over all bigrams, in all held-out responses before training.",
    "distinct2_after": "The same after training: a collapse onto a few phrases would show here.",
    "unique_before": "Share of different responses among the held-out responses before training.",
    "unique_after": "The same after training.",
    "ev_v0": "Share of the returns' variance that critic version 0 explains on the held-out rollouts.",
    "ev_last": "The same for the last version, asked through the server, on the same rollouts.",
    "weights_version": "Version of the critic's weights that the server ended with.",
    "critic_updates": "Updates of the critic by the sidecar.",
    "reloads_swap": "New weights taken in place, inside the running server process.",
    "reloads_triton": "New weights taken through Triton's load call, in a fresh model instance.",
    "failed_requests": "Requests that failed, by the client's count.",
    "server_failures": "Requests that failed, by the server's own count (nv_inference_request_failure).",
    "masked_samples": "Samples left out of training because they have no reward.",
    "seconds_total": "Seconds of the whole command, preparation included.",
    "seconds_per_step": "Seconds per step.",
    "swap_ms_p50": "Median milliseconds from publishing to serving, by swap.",
    "triton_reload_ms_p50": "Median milliseconds of a Triton reload; the old weights serve meanwhile.",
    "peak_rss_mb": "Largest memory of all processes together, in MB.",
}

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #202124;
  max-width: 1180px; margin: 0 auto; padding: 24px; background: #fff; }}
h1 {{ font-size: 26px; margin: 0 0 4px; }}
h2 {{ font-size: 20px; margin: 40px 0 8px; border-bottom: 1px solid #e8eaed; padding-bottom: 4px; }}
p, figcaption, small {{ color: #5f6368; }}
.headline p {{ margin: 18px 0 0; }}
.headline ul {{ margin: 4px 0 0; padding-left: 20px; }}
.headline li {{ margin: 4px 0; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 16px; }}
.cards div {{ border: 1px solid #e8eaed; border-radius: 8px; padding: 10px 14px; background: #f8f9fa; }}
.cards b {{ display: block; font-size: 26px; line-height: 1.25; color: #0072b2; }}
.cards small {{ display: block; font-size: 13px; }}
.curves {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 20px 28px; }}
figure {{ margin: 0; }}
figure img {{ width: 100%; }}
figcaption {{ font-size: 14px; padding-left: 8px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 15px; }}
td, th {{ text-align: left; vertical-align: top; padding: 5px 10px; border-bottom: 1px solid #e8eaed; }}
th {{ font-size: 13px; color: #5f6368; }}
.n {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
table.words {{ width: auto; }}
table i {{ display: inline-block; height: 11px; border-radius: 2px; background: #d55e00; }}
table i.up {{ background: #0072b2; }}
td.up {{ color: #0072b2; }} td.down {{ color: #d55e00; }}
.texts {{ table-layout: fixed; }}
.texts td {{ overflow-wrap: anywhere; }}
.texts th:last-child {{ width: 62px; }}
.texts th[colspan] {{ width: auto; padding-top: 18px; color: #202124; font-size: 15px; background: #f8f9fa; }}
.texts em {{ color: #80868b; font-style: normal; }}
.texts small {{ float: right; padding-left: 8px; font-variant-numeric: tabular-nums; }}
mark {{ background: #d6ebf7; color: inherit; border-radius: 2px; padding: 0 2px; }}
</style></head><body>
<h1>{name}: RLHF on Triton</h1>
{body}
</body></html>
"""
