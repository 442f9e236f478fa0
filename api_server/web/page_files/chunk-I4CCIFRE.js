import{d as b,s as l}from"./chunk-3QODNAS5.js";async function O(e,n){try{await navigator.clipboard.writeText(e)}catch{return}if(!n)return;let t=n.textContent;n.textContent="Copied",setTimeout(()=>n.textContent=t,1200)}var x=[{name:"temperature",label:"Temperature",kind:"number",min:0,max:2,step:.05},{name:"top_p",label:"Top p",kind:"number",min:0,max:1,step:.01},{name:"top_k",label:"Top k",kind:"number",min:-1,step:1},{name:"min_p",label:"Min p",kind:"number",min:0,max:1,step:.01},{name:"max_tokens",label:"Longest answer",kind:"number",min:1,step:1},{name:"seed",label:"Seed",kind:"number",step:1},{name:"n",label:"Answers",kind:"number",min:1,max:8,step:1},{name:"repetition_penalty",label:"Repetition penalty",kind:"number",min:0,max:2,step:.05},{name:"presence_penalty",label:"Presence penalty",kind:"number",min:-2,max:2,step:.1},{name:"frequency_penalty",label:"Frequency penalty",kind:"number",min:-2,max:2,step:.1},{name:"stop",label:"Stop texts",kind:"lines",hint:"one a line"},{name:"logit_bias",label:"Logit bias",kind:"json",hint:'{"token id": -100 to 100}'},{name:"thinking",label:"Reasoning",kind:"choice",choices:[["","as the model does"],["on","on"],["off","off"]]},{name:"tools",label:"Tools",kind:"json",hint:"a list of functions, as OpenAI's API has them"},{name:"deterministic",label:"Deterministic",kind:"switch",hint:"the same tokens whatever else runs"},{name:"priority",label:"Priority",kind:"number",min:-1e3,max:1e3,step:1},{name:"timeout",label:"Deadline in seconds",kind:"number",min:.1,step:"any"},{name:"extra",label:"Further fields",kind:"json",hint:"an object that is added to the body"}],T=[["","text"],["json_object","JSON"],["json_schema","JSON schema"],["regex","regular expression"],["grammar","grammar (EBNF)"]];function d(e){try{return e.trim()&&JSON.parse(e),""}catch(n){return n.message}}function S(e){for(let{name:t,label:r,kind:o}of x){let i=o==="json"&&e[t]?d(e[t]):"";if(i)return`${r}: ${i}`}let n=e.format==="json_schema"?d(e.formatText??""):"";return n?`JSON schema: ${n}`:""}function w(e){let n={};for(let{name:t,kind:r}of x){let o=e[t];o===void 0||o===""||o===!1||(t==="thinking"?n.chat_template_kwargs={enable_thinking:o==="on"}:t==="extra"?Object.assign(n,JSON.parse(o)):r==="json"?n[t]=JSON.parse(o):r==="lines"?n[t]=o.split(`
`).filter(Boolean):n[t]=o)}return e.model&&(n.model=e.model),e.tokenMap&&Object.assign(n,{logprobs:!0,top_logprobs:5}),{...n,...$(e)}}function $(e){let n=e.formatText??"";return e.format==="json_object"?{response_format:{type:"json_object"}}:n.trim()?e.format==="json_schema"?{response_format:{type:"json_schema",json_schema:{name:"answer",schema:JSON.parse(n)}}}:e.format?{structured_outputs:{[e.format]:n}}:{}:{}}function N(e,n){let t=n?' -H "Authorization: Bearer $TOKENYARD_KEY"':"",r=JSON.stringify(e,null,2).replaceAll("'","'\\''");return`curl -N ${location.origin}/v1/chat/completions${t} -H 'Content-Type: application/json' -d '${r}'`}function M(e,n){let t=n?'os.environ["TOKENYARD_KEY"]':'"none"';return`import json
${n?`import os
`:""}
from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${t})
body = json.loads(r'''${JSON.stringify(e,null,2).replaceAll("'''","''\\u0027")}''')
body.setdefault("model", "default")
own = {"messages", "model", "stream", "stream_options"}
stream = client.chat.completions.create(
    **{name: body.pop(name) for name in list(body) if name in own}, extra_body=body
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`}var h=[.9,.7,.4,.15,.03];function k(e){let n=Math.exp(e),t=h.findIndex(r=>n>=r);return`p${t<0?h.length:t}`}function p(e){let n=100*Math.exp(e);return n>=10?`${n.toFixed(0)} %`:n>=.01?`${n.toPrecision(2)} %`:"< 0.01 %"}function u(e){return e.some(n=>n.bytes===null)?e.map(n=>n.text).join(""):new TextDecoder().decode(Uint8Array.from(e.flatMap(n=>n.bytes??[])))}function y(e,n,t){let r=e.tokens,o=e.content.slice((e.prefill??"").length),i=u([...r.slice(0,n),t]),m=e.reasoning?u(r).lastIndexOf(o.trimEnd()):0;return m<0||u(r.slice(0,n)).length<m?null:(e.prefill??"")+i.slice(m)}function D({message:e,onContinue:n}){let[t,r]=b(-1),o=e.tokens??[],i=o[t];return l`<div class="token-map">
    <div class="tokens" role="group" aria-label="Tokens by probability" onKeyDown=${a=>{let s={ArrowRight:1,ArrowLeft:-1}[a.key];if(!s)return;a.preventDefault();let f=Math.max(0,Math.min(o.length-1,t+s));r(f),a.currentTarget.querySelectorAll("button")[f].focus()}}>
      ${o.map((a,s)=>l`<button
            type="button"
            class=${`token ${k(a.logprob)}`}
            tabindex=${s===Math.max(t,0)?0:-1}
            aria-pressed=${s===t}
            title=${_(a)}
            onClick=${()=>r(s===t?-1:s)}
          >
            ${c(a.text)}
          </button>`)}
    </div>
    ${i&&l`<${g} message=${e} index=${t} onContinue=${n} />`}
  </div>`}function g({message:e,index:n,onContinue:t}){let r=e.tokens[n];return l`<div class="alternatives" role="group" aria-label="Alternatives">
    <span>Token ${n+1}: <code>${c(r.text)}</code> ${p(r.logprob)}. Continue from:</span>
    ${r.top.map(o=>{let i=y(e,n,o);return l`<button
        type="button"
        class=${`alternative ${k(o.logprob)}`}
        disabled=${!i?.trim()}
        onClick=${()=>i&&t(i)}
      >
        <code>${c(o.text)}</code> ${p(o.logprob)}
      </button>`})}
  </div>`}function _(e){let n=e.top.map(t=>`${c(t.text)}  ${p(t.logprob)}`);return[`${c(e.text)}  ${p(e.logprob)}`,"",...n].join(`
`)}function c(e){return e.replaceAll(`
`,"\u21B5").replaceAll("	","\u2192")||"\u2205"}export{O as a,x as b,T as c,d,S as e,w as f,N as g,M as h,k as i,p as j,D as k};
