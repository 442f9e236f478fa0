import{a as R,f as D,i as O,j as U}from"./chunk-I4CCIFRE.js";import{d as p,e as v,f as x,h as C,m as h,n as T,o as S,p as I,s as i}from"./chunk-3QODNAS5.js";import"./chunk-SQE76S5B.js";var E="/v1/completions",L="tokenyard-raw",P=[["max_tokens","Most tokens",{min:1,step:1}],["temperature","Temperature",{min:0,max:2,step:.05}],["top_p","Top p",{min:0,max:1,step:.01}],["seed","Seed",{step:1}]],f=C("");function _(){try{return JSON.parse(localStorage.getItem(L)??"{}")}catch{return{}}}function nt(){let t=I.value?.task,n={paint:q,speak:F,transcribe:H}[t]??V;return i`<section class="raw" aria-label="Raw"><${n} /></section>`}function V(){let t=x(null),n=x(null),[o,r]=p(_),[a,s]=p(!1),[l,c]=p(""),[b,w]=p("");v(()=>(t.current&&(t.current.textContent=f.value),()=>y()),[]);let y=()=>{if(!n.current)return;let{controller:e,body:u,id:m,last:d}=n.current;e.abort(),S(E,u,m,d)},J=(e,u)=>{let m={...o,[e]:u===""?void 0:Number(u)};r(m),localStorage.setItem(L,JSON.stringify(m))},k=async()=>{let e=t.current;e.textContent=f.value=e.textContent??"";let u=`ui-${crypto.randomUUID?.()??Date.now()}`,m={prompt:f.value,...D(o),logprobs:5,stream:!0},d={controller:new AbortController,body:m,id:u,last:""};n.current=d,s(!0),c(""),w("The model goes on.");let $="";try{for await(let g of T(E,m,{signal:d.controller.signal,requestId:u})){d.last=g.id;for(let N of g.value.choices??[])W(e,N)}}catch(g){d.controller.signal.aborted||($=g.message)}n.current=null,f.value=e.textContent??"",s(!1),c($),w($?`It failed: ${$}`:"The model has ended.")},K=()=>{let e=t.current;for(let u of e.querySelectorAll(".answered"))u.remove();f.value=e.textContent??""};return i`<p>The model continues this text as it is, without a chat's form. What it adds is coloured by its probability.</p>
    <div
      class="raw-text"
      role="textbox"
      aria-multiline="true"
      aria-label="Text"
      tabindex="0"
      contenteditable=${a?"false":"plaintext-only"}
      spellcheck=${!1}
      ref=${t}
      onInput=${()=>f.value=t.current?.textContent??""}
      onKeyDown=${e=>{e.key==="Enter"&&(e.ctrlKey||e.metaKey)?(e.preventDefault(),a||k()):e.key==="Escape"&&a&&y()}}
    ></div>
    ${l&&i`<p class="problem" role="alert">${l}</p>`}
    <p class="unseen" role="status" aria-live="polite">${b}</p>
    <div class="raw-fields">
      ${P.map(([e,u,m])=>i`<label>${u}<input type="number" ...${m} value=${o[e]??""}
            onInput=${d=>J(e,d.target.value)} /></label>`)}
    </div>
    <div class="buttons">
      ${a?i`<button type="button" class="primary" onClick=${y}>Stop</button>`:i`<button type="button" class="primary" onClick=${k}>Go on</button>
              <button type="button" onClick=${K}>Take back</button>
              <button type="button" onClick=${e=>{R(t.current?.textContent??"",e.currentTarget)}}>Copy</button>`}
    </div>`}function W(t,n){let{tokens:o=[],token_logprobs:r=[],top_logprobs:a=[]}=n.logprobs??{},s=n.text??"";o.forEach((l,c)=>{let b=s.startsWith(l)?l:c===o.length-1?s:"";s=s.slice(b.length),b&&t.append(j(b,r[c],a[c]))}),s&&t.append(j(s,0,null))}function j(t,n,o){let r=document.createElement("span");return r.className=`answered ${O(n??0)}`,r.textContent=t,r.title=Object.entries(o??{}).map(([a,s])=>`${a}  ${U(s)}`).join(`
`),r}function A(){let[t,n]=p(!1),[o,r]=p("");return[t,o,s=>{n(!0),r(""),s().catch(l=>r(l.message)).finally(()=>n(!1))}]}function q(){return i`<p>This model paints: see <a href="#images">Images</a>.</p>`}function F(){let[t,n]=p(""),[o,r]=p(""),[a,s,l]=A();return v(()=>()=>URL.revokeObjectURL(o),[o]),i`<${B} label="What is said" text=${t} setText=${n} name="Speak" ...${{running:a,problem:s}} onBegin=${()=>l(async()=>{let b=await h("/v1/audio/speech",JSON.stringify({input:t,response_format:"wav"}),"application/json");r(URL.createObjectURL(await b.blob()))})} />
    ${o&&i`<audio controls src=${o} aria-label="The sound"></audio>`}`}function H(){let[t,n]=p(""),[o,r,a]=A(),s=l=>{l&&a(async()=>{let c=new FormData;c.append("file",l);let b=await h("/v1/audio/transcriptions",c);n((await b.json()).text)})};return i`<label>A file with speech<input type="file" accept="audio/*" disabled=${o}
      onChange=${l=>s(l.target.files[0])} /></label>
    ${r&&i`<p class="problem" role="alert">${r}</p>`}
    <p class="plain" role="status">${o?"The model listens.":t}</p>`}function B({label:t,text:n,setText:o,name:r,running:a,problem:s,onBegin:l}){return i`<label>${t}<textarea rows="3" value=${n} onInput=${c=>o(c.target.value)}></textarea></label>
    ${s&&i`<p class="problem" role="alert">${s}</p>`}
    <div class="buttons">
      <button type="button" class="primary" disabled=${a||!n.trim()} onClick=${l}>${a?"Please wait":r}</button>
    </div>`}export{nt as Raw};
